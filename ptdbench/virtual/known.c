/* Which values on devices are known: those that were copied there, received, or computed from known ones. All others
 * are what memory held before, and nothing may be decided by them.
 *
 * Known ranges are kept by where they start. A range is forgotten when its memory is released, and, in a process that
 * watch.py watches, when torch allocates its first bytes anew. */
#include "virtual.h"

#include <pthread.h>

struct range {
    const char *start, *end;
    struct range *next;
};

/* Buckets by the address of the start in units that no range of copied or computed values exceeds. */
#define UNIT (2 * MIB)
#define BUCKETS 16384
static struct range *ranges[BUCKETS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct range **bucket(uintptr_t unit) { return &ranges[unit % BUCKETS]; }

/* Forgets the ranges that start within some bytes; the caller holds the lock. */
static void drop(const char *address, size_t bytes) {
    for (uintptr_t unit = (uintptr_t)address / UNIT; unit <= ((uintptr_t)address + bytes - 1) / UNIT; unit++)
        for (struct range **at = bucket(unit), *r; (r = *at);) {
            if (r->start < address || r->start >= address + bytes) {
                at = &r->next;
                continue;
            }
            *at = r->next;
            free(r);
        }
}

void know(const void *address, size_t bytes, bool is) {
    if (device_of(address) < 0 || !bytes) return;
    pthread_mutex_lock(&lock);
    drop(address, bytes < BUCKETS * UNIT ? bytes : BUCKETS * UNIT);
    if (is && bytes <= UNIT) {
        struct range **at = bucket((uintptr_t)address / UNIT), *new = malloc(sizeof *new);
        *new = (struct range){address, (const char *)address + bytes, *at};
        *at = new;
    }
    pthread_mutex_unlock(&lock);
}

bool known(const void *address, size_t bytes) {
    const char *start = address, *end = start + bytes;
    bool is = device_of(address) < 0;
    pthread_mutex_lock(&lock);
    for (uintptr_t unit = (uintptr_t)address / UNIT, i = 0; i < 2 && !is; i++)
        for (struct range *r = *bucket(unit - i); r && !is; r = r->next) is = r->start <= start && end <= r->end;
    pthread_mutex_unlock(&lock);
    return is;
}

/* What torch allocates anew has no values; a scalar, which a program may read, is 0. */
API void ptdbench_virtual_allocated(char *address) {
    enum { SMALLEST = 512 }; /* bytes of torch's blocks */
    know(address, SMALLEST, false);
    if (backed_at(address)) memset(address, 0, SMALLEST);
}
