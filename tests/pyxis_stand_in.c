/* A stand-in for Pyxis on the test cluster: the same flags of srun, for images that are folders.
 *
 * Each task of a step with --container-image=FOLDER gets a mount namespace of its own, in which --container-mounts
 * are bound into the folder, and the folder is its root.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <slurm/spank.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

SPANK_PLUGIN(pyxis_stand_in, 1)

static char *image, *mounts, *workdir;

static int keep(int which, const char *value, int remote) {
    (void)remote;
    *(char **[]){&image, &mounts, &workdir}[which] = strdup(value);
    return 0;
}

static struct spank_option options[] = {
    {"container-image", "FOLDER", "[stand-in for pyxis] the root of the container", 1, 0, keep},
    {"container-mounts", "SRC:DST[,...]", "[stand-in for pyxis] folders bound into it", 1, 1, keep},
    {"container-workdir", "PATH", "[stand-in for pyxis] working directory in it", 1, 2, keep},
};

int slurm_spank_init(spank_t spank, int argc, char **argv) {
    (void)argc, (void)argv;
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        if (spank_option_register(spank, &options[i])) return -1;
    return 0;
}

static int failed(const char *what) {
    slurm_error("pyxis: %s: %m", what);
    return -1;
}

/* mkdir -p below the image. */
static void make(char *path) {
    for (char *slash = path + strlen(image) + 1; (slash = strchr(slash, '/')); *slash++ = '/') {
        *slash = 0;
        mkdir(path, 0755);
    }
    mkdir(path, 0755);
}

int slurm_spank_task_init_privileged(spank_t spank, int argc, char **argv) {
    (void)spank, (void)argc, (void)argv;
    if (!image) return 0;
    if (access(image, F_OK)) return failed(image);
    if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL)) return failed("unshare");
    for (char *rest, *one = strtok_r(mounts ? mounts : "", ",", &rest); one; one = strtok_r(NULL, ",", &rest)) {
        char inside[4096], *source = strsep(&one, ":"), *target = strsep(&one, ":");
        snprintf(inside, sizeof inside, "%s%s", image, target);
        make(inside);
        if (mount(source, inside, NULL, MS_BIND | MS_REC, NULL)) return failed(source);
    }
    if (chroot(image) || chdir(workdir ? workdir : "/")) return failed(workdir);
    return 0;
}
