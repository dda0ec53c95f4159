/* What this process has had its devices do since it started: kernels by name, FLOPs of products, messages, and memory;
 * watch.py takes the differences of a step. Work of a graph counts at each of its launches. */
#include "virtual.h"

#include <pthread.h>

struct count {
    const char *name; /* lives as long as the process */
    size_t calls, bytes;
    struct count *next;
};

#define BUCKETS 4096
static struct count *kernels[BUCKETS], *messages[BUCKETS];
static double flops;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void add(struct count **table, const char *name, size_t bytes) {
    struct count **bucket = &table[((uintptr_t)name >> 3) % BUCKETS], *found = *bucket;
    while (found && found->name != name) found = found->next;
    if (!found) {
        found = malloc(sizeof *found);
        *found = (struct count){name, 0, 0, *bucket};
        *bucket = found;
    }
    found->calls++, found->bytes += bytes;
}

void count_work(const struct work *work) {
    pthread_mutex_lock(&lock);
    if (work->kind == KERNEL) add(kernels, work->name, 0);
    if (work->operation) add(messages, work->operation, work->bytes);
    flops += work->flops;
    pthread_mutex_unlock(&lock);
}

/* Reads of single values by the host since data last came from it: a program that goes on reading never ends. */
static size_t reads;

void count_copy(bool to_device, size_t bytes) {
    enum { VALUE = 8, DATA = 256 };
    pthread_mutex_lock(&lock);
    if (to_device && bytes >= DATA)
        reads = 0;
    else if (!to_device && bytes <= VALUE)
        reads++;
    pthread_mutex_unlock(&lock);
}

static void print(FILE *to, const char *what, struct count **table) {
    for (int i = 0; i < BUCKETS; i++)
        for (struct count *c = table[i]; c; c = c->next)
            fprintf(to, "%s\t%s\t%zu\t%zu\n", what, c->name, c->calls, c->bytes);
}

/* Returns lines of fields separated by tabs, valid until the next call; names may repeat. */
API const char *ptdbench_virtual_account(void) {
    static char *text;
    static size_t bytes;
    pthread_mutex_lock(&lock);
    free(text);
    FILE *to = open_memstream(&text, &bytes);
    print(to, "kernel", kernels);
    print(to, "message", messages);
    fprintf(to, "flops\t%.0f\nreads\t%zu\n", flops, reads);
    for (int i = 0; i < visible_count(); i++)
        if (has_context(i)) fprintf(to, "device\t%d\t%zu\n", i, peak_of_device(i));
    fclose(to);
    pthread_mutex_unlock(&lock);
    return text;
}
