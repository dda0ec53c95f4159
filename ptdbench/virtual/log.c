/* The log of a few steps: work, events, waits of the host, messages and marks, in the order of their calls. Python starts
 * and ends it, for the steps that it wants; prediction/log.py reads it, and describes the fields of a record.
 */
#include "virtual.h"

#include <pthread.h>
#include <time.h>

struct record { /* little-endian, without padding */
    uint8_t kind, flags;
    uint16_t thread;
    uint32_t stream, name;
    float gap;
    uint64_t bytes, object;
    uint32_t grid[3], block;
    int32_t dims[DIMS];
    uint32_t sequence;
    uint16_t operators, device;
    uint8_t dtype, result, layout, operation;
    uint32_t reserved;
};
_Static_assert(sizeof(struct record) == 96, "log.py reads records of this size");

enum { VERSION = 1, MOST_RECORDS = 1000000, BUCKETS = 4096 };

static FILE *volatile file;
static FILE *names;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t count;
static unsigned starts, thread_count; /* starts: logs of this process so far */
static unsigned operators; /* that torch has begun since the last record, in any thread: a pass ends without one */

static __thread struct {
    unsigned started, number; /* of the log that the others are of; the thread's number in it */
    double last;              /* microseconds of the processor at its last record */
} mine;

static double processor_time(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

/* ---- names, numbered from 1 by their addresses, as they live as long as the process ---- */

static struct name {
    const char *text;
    uint32_t number;
    struct name *next;
} *table[BUCKETS];
static uint32_t name_count;

static uint32_t number_of(const char *text) {
    if (!text) return 0;
    struct name **at = &table[((uintptr_t)text >> 3) % BUCKETS];
    while (*at && (*at)->text != text) at = &(*at)->next;
    if (!*at) {
        *at = malloc(sizeof **at);
        **at = (struct name){text, ++name_count, NULL};
        fprintf(names, "%s\n", demangled(text));
    }
    return (*at)->number;
}

static void forget_names(void) {
    for (int i = 0; i < BUCKETS; i++)
        for (struct name *next; table[i]; table[i] = next) next = table[i]->next, free(table[i]);
    name_count = 0;
}

/* ---- records ---- */

static void write_record(struct record r, const char *name) {
    pthread_mutex_lock(&lock);
    if (file && count < MOST_RECORDS) {
        double time = processor_time();
        if (mine.started != starts) mine.started = starts, mine.number = ++thread_count, mine.last = time;
        r.thread = mine.number, r.name = number_of(name), r.gap = time - mine.last;
        unsigned begun = __atomic_exchange_n(&operators, 0, __ATOMIC_RELAXED);
        r.operators = begun < UINT16_MAX ? begun : UINT16_MAX, r.device = current_device();
        fwrite(&r, sizeof r, 1, file);
        if (++count == MOST_RECORDS) fprintf(stderr, "virtual GPU: the log ends here, after %zu records\n", count);
        if (r.kind == 'M') fflush(file), fflush(names); /* a program may be ended after a step */
        mine.last = processor_time();
    }
    pthread_mutex_unlock(&lock);
}

void log_work(const struct work *w, unsigned stream) {
    if (!file) return;
    const struct detail *d = &w->detail;
    char kind = d->communicator && w->kind == KERNEL ? 'N' : "KCST"[w->kind];
    struct record r = {.kind = kind, .flags = d->flags, .stream = stream, .bytes = w->bytes, .object = d->communicator,
                       .grid = {w->grid.x, w->grid.y, w->grid.z}, .block = w->block.x * w->block.y * w->block.z,
                       .sequence = d->sequence, .dtype = d->dtype, .result = d->result, .layout = d->layout,
                       .operation = d->operation};
    memcpy(r.dims, d->dims, sizeof r.dims);
    write_record(r, w->name);
}

void log_call(char kind, unsigned stream, uint64_t object) {
    if (file) write_record((struct record){.kind = kind, .stream = stream, .object = object}, NULL);
}

static __thread int excluded; /* in how many calls this thread computes in place of a device */

void count_operator(void) {
    if (file && !excluded) __atomic_fetch_add(&operators, 1, __ATOMIC_RELAXED);
}

/* ---- what Python calls ---- */

/* Writes what happens from now on to `path`.log and its names to `path`.names, after a line of facts; NULL ends that.
 * Returns whether it could. */
API int ptdbench_virtual_log(const char *path, const char *facts) {
    char name[4096];
    pthread_mutex_lock(&lock);
    if (file) fclose(file), fclose(names), file = NULL;
    forget_names();
    if (path) {
        snprintf(name, sizeof name, "%s.names", path);
        names = fopen(name, "w");
        snprintf(name, sizeof name, "%s.log", path);
        FILE *opened = names ? fopen(name, "w") : NULL;
        if (opened) {
            fprintf(opened, "ptdlog%c%c", VERSION, (int)sizeof(struct record));
            fprintf(names, "%s\n", facts);
            starts++, count = thread_count = operators = 0, file = opened;
        } else if (names) {
            fclose(names);
        }
    }
    bool is = !path || file;
    pthread_mutex_unlock(&lock);
    return is;
}

API void ptdbench_virtual_exclude(bool is) { excluded += is ? 1 : -1; }

API void ptdbench_virtual_mark(const char *text) {
    if (file) write_record((struct record){.kind = 'M'}, kept(text));
}
