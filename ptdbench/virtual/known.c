/* Which values on devices are known: those that were copied there, received, or computed from known ones. All others
 * are what memory held before, and nothing may be decided by them.
 *
 * Known ranges are kept by where they start. A range is forgotten when its memory is released, and when torch allocates
 * or releases a block that begins there. */
#include "virtual.h"

#include <dlfcn.h>
#include <pthread.h>

struct span {
    const char *start, *end;
    struct span *next;
};

/* Buckets by the address of the start in units that no range of copied or computed values exceeds. */
#define UNIT (16 * MIB)
#define BUCKETS 16384
static struct span *ranges[BUCKETS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct span **bucket(uintptr_t unit) { return &ranges[unit % BUCKETS]; }

/* Forgets the ranges that start within some bytes; the caller holds the lock. */
static void drop(const char *address, size_t bytes) {
    for (uintptr_t unit = (uintptr_t)address / UNIT; unit <= ((uintptr_t)address + bytes - 1) / UNIT; unit++)
        for (struct span **at = bucket(unit), *r; (r = *at);) {
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
        struct span **at = bucket((uintptr_t)address / UNIT), *new = malloc(sizeof *new);
        *new = (struct span){address, (const char *)address + bytes, *at};
        *at = new;
    }
    pthread_mutex_unlock(&lock);
}

/* The range in which a byte lies, if any; the caller holds the lock. */
static const struct span *around(const char *at) {
    for (uintptr_t unit = (uintptr_t)at / UNIT, i = 0; i < 2; i++)
        for (const struct span *r = *bucket(unit - i); r; r = r->next)
            if (r->start <= at && at < r->end) return r;
    return NULL;
}

bool known(const void *address, size_t bytes) {
    const char *at = address, *end = at + bytes;
    if (device_of(address) < 0) return true;
    pthread_mutex_lock(&lock);
    for (const struct span *r; at < end && (r = around(at));) at = r->end;
    pthread_mutex_unlock(&lock);
    return at >= end;
}

enum { SMALLEST = 512 }; /* bytes of torch's blocks, and their alignment */

/* What torch allocates anew has no values; a scalar, which a program may read, is 0. */
static void begin_block(char *address) {
    know(address, SMALLEST, false);
    if (backed_at(address)) memset(address, 0, SMALLEST);
}

/* torch tells of its allocations and releases by virtual functions of C++, which its sanitizer has call Python. This
 * would lose a Python exception that passes through torch meanwhile, such as the one by which recomputation stops early,
 * so this function takes the place of all of them. Only of blocks do they have an address on a device, except that a
 * wait for the device has none at all. */
static void follow(void *interpreter, int type, char *address) {
    if (device_of(address) >= 0 && (uintptr_t)address % SMALLEST == 0) begin_block(address);
}

/* For computed.py: follow torch's blocks, unless this torch cannot, or its sanitizer runs. */
API void ptdbench_virtual_follow_blocks(void) {
    static void *functions[128] /* torch 2.14 has 44 */, *object = functions, *interpreter = &object;
    void *torch = dlopen("libc10.so", RTLD_NOW | RTLD_NOLOAD);
    bool *active = torch ? dlsym(torch, "_ZN3c104impl8GPUTrace9haveStateE") : NULL;
    const void **state = torch ? dlsym(torch, "_ZN3c104impl8GPUTrace13gpuTraceStateE") : NULL;
    if (!active || !state || *active) return;
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) functions[i] = follow;
    *state = &interpreter;
    *active = true;
}

/* For computed.py: whether values are known; makes them so before they are written, false if they cannot be. */
API bool ptdbench_virtual_known(const void *address, size_t bytes) { return known(address, bytes); }
API bool ptdbench_virtual_know(void *address, size_t bytes) {
    return writable(address, bytes) && (know(address, bytes, true), true);
}
