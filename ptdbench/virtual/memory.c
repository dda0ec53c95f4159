/* Memory: a range of addresses for each device, of which the host backs only pages that are written.
 *
 * Exact: sizes, pages of 2 MiB, free memory, running out of memory. Absent: most contents. Memory that was never
 * written or was freed reads as zeros; once BACKED bytes are written, further writes are dropped. Blocks that torch
 * caches keep what was written last, as on a device.
 */
#include "virtual.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE (2 * MIB)     /* of a device's memory */
#define GRANULE (64 * KIB) /* unit in which backed memory is counted */
#define BACKED (512 * MIB)
/* Addresses of all devices: expandable segments reserve 9/8 of a device's memory for each pool and stream. Half of the
 * space is for the first device that is used, as a rank uses no other. */
#define SPACE ((size_t)64 << 40)
#define FIRST (SPACE / 2)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- addresses ---- */

struct range *take_out(struct range **list, const void *start) {
    while (*list && (*list)->start != start) list = &(*list)->next;
    struct range *found = *list;
    if (found) *list = found->next;
    return found;
}

struct range *range_of(struct range *list, const void *address) {
    const char *at = address;
    while (list && (at < list->start || at >= list->start + list->bytes)) list = list->next;
    return list;
}

static char *base;
static uint8_t *backed; /* one flag per granule */
static size_t backed_bytes;
static int first_device;
static struct range *gaps[MOST_DEVICES]; /* free address ranges of each device, in order */

static size_t stretch(void) { return (SPACE - FIRST) / (machine_count() < 8 ? 8 : machine_count()) / PAGE * PAGE; }

void *map(void *where, size_t bytes) {
    void *address = mmap(where, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) return NULL;
    madvise(address, bytes, MADV_NOHUGEPAGE); /* otherwise a single written byte would take 2 MiB */
    return address;
}

static void map_space(void) {
    char *space = map((void *)0x200000000000, SPACE);
    backed = map(NULL, SPACE / GRANULE);
    if (!space || !backed) {
        perror("virtual GPU: cannot reserve addresses (limited by ulimit -v, or by vm.overcommit_memory=2?)");
        _exit(70);
    }
    for (int i = 0; i < machine_count(); i++) {
        gaps[i] = malloc(sizeof *gaps[i]);
        *gaps[i] = i == first_device ? (struct range){space, FIRST, i, NULL}
                                     : (struct range){space + FIRST + stretch() * i, stretch(), i, NULL};
    }
    base = space;
}

int device_of(const void *address) {
    const char *at = address;
    if (!base || at < base || at >= base + SPACE) return -1;
    return at < base + FIRST ? first_device : (int)((size_t)(at - base - FIRST) / stretch());
}

/* Takes the first gap that is large enough. A guard page after it stays free, so that an overrun hits no other
 * allocation. The caller holds the lock. */
static char *reserve_addresses(int on, size_t bytes) {
    if (!base) first_device = on, map_space();
    bytes = round_up(bytes, PAGE) + PAGE;
    for (struct range **at = &gaps[on]; *at; at = &(*at)->next) {
        struct range *gap = *at;
        if (gap->bytes < bytes) continue;
        char *address = gap->start;
        gap->start += bytes;
        gap->bytes -= bytes;
        if (!gap->bytes) {
            *at = gap->next;
            free(gap);
        }
        return address;
    }
    return NULL;
}

static void release_addresses(char *address, size_t bytes) {
    int on = device_of(address);
    struct range *gap = malloc(sizeof *gap), **at = &gaps[on], *before = NULL;
    *gap = (struct range){address, round_up(bytes, PAGE) + PAGE, on, NULL};
    for (; *at && (*at)->start < address; at = &(*at)->next) before = *at;
    gap->next = *at;
    *at = gap;
    if (gap->next && gap->start + gap->bytes == gap->next->start) {
        struct range *next = gap->next;
        gap->bytes += next->bytes, gap->next = next->next;
        free(next);
    }
    if (before && before->start + before->bytes == gap->start) {
        before->bytes += gap->bytes, before->next = gap->next;
        free(gap);
    }
}

/* ---- contents ---- */

bool readable(const void *address, size_t bytes) {
    int on = device_of(address);
    return on >= 0 && bytes <= SPACE && device_of((const char *)address + bytes) == on;
}

static uint8_t *flag_of(const void *address) { return backed + (size_t)((const char *)address - base) / GRANULE; }

bool backed_at(const void *address) { return device_of(address) >= 0 && *flag_of(address); }

bool writable(void *address, size_t bytes) {
    if (!readable(address, bytes)) return false;
    bool may = true;
    pthread_mutex_lock(&lock);
    for (uint8_t *flag = flag_of(address), *last = flag_of((char *)address + (bytes ? bytes - 1 : 0));
         may && flag <= last; flag++) {
        if (*flag) continue;
        may = backed_bytes + GRANULE <= BACKED;
        if (may) *flag = 1, backed_bytes += GRANULE;
    }
    pthread_mutex_unlock(&lock);
    return may;
}

/* Drops the whole pages of a range, so that they read as zeros and take no memory; the partial pages at both ends are
 * cleared. */
void forget(char *address, size_t bytes) {
    char *end = address + bytes, *first = (char *)round_up((size_t)address, HOST_PAGE);
    char *last = (char *)((size_t)end / HOST_PAGE * HOST_PAGE);
    if (first >= last) {
        memset(address, 0, bytes);
        return;
    }
    madvise(first, last - first, MADV_DONTNEED);
    if (first > address) memset(address, 0, first - address);
    if (end > last) memset(last, 0, end - last);
}

void zero(void *address, size_t bytes) {
    if (!bytes || !readable(address, bytes)) return;
    pthread_mutex_lock(&lock);
    forget(address, bytes);
    size_t first = round_up((size_t)((char *)address - base), GRANULE) / GRANULE,
           end = (size_t)((char *)address + bytes - base) / GRANULE;
    for (uint8_t *at = backed + first; first < end && (at = memchr(at, 1, backed + end - at)); at++)
        *at = 0, backed_bytes -= GRANULE;
    pthread_mutex_unlock(&lock);
}

/* ---- allocations ---- */

static struct range *allocations; /* on devices */
static size_t used[MOST_DEVICES], most_used[MOST_DEVICES];

size_t peak_of_device(int number) { return device()->context + most_used[number]; }

/* Allocates physical memory of a device, without addresses; the caller holds the lock. */
static bool take(int on, size_t bytes) {
    const struct device *d = device();
    bool fits = d->context + used[on] + bytes <= d->allocatable;
    if (fits) used[on] += bytes;
    if (used[on] > most_used[on]) most_used[on] = used[on];
    return fits;
}

API cudaError_t cudaMalloc(void **address, size_t bytes) {
    cudaError_t error = ready();
    int on = current_device();
    size_t pages = round_up(bytes ? bytes : 1, PAGE);
    *address = NULL;
    if (error) return error;
    pthread_mutex_lock(&lock);
    if (!take(on, pages)) {
        error = cudaErrorMemoryAllocation;
    } else if (!(*address = reserve_addresses(on, pages))) {
        used[on] -= pages;
        error = cudaErrorNotSupported; /* not out of memory: a real device would not run out of addresses */
    } else {
        struct range *new = malloc(sizeof *new);
        *new = (struct range){*address, pages, on, allocations};
        allocations = new;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

API cudaError_t cudaFree(void *address) {
    cudaError_t error = ready();
    if (error || !address) return error;
    pthread_mutex_lock(&lock);
    struct range *found = take_out(&allocations, address);
    if (found) used[found->device] -= found->bytes;
    pthread_mutex_unlock(&lock);
    if (!found) return cudaErrorInvalidValue;
    zero(found->start, found->bytes);
    know(found->start, found->bytes, false);
    pthread_mutex_lock(&lock);
    release_addresses(found->start, found->bytes);
    pthread_mutex_unlock(&lock);
    free(found);
    return cudaSuccess;
}

API cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    cudaError_t error = ready();
    if (error) return error;
    const struct device *d = device();
    size_t taken = d->context + used[current_device()];
    size_t all = d->allocatable < d->memory ? d->allocatable : d->memory;
    *total = d->memory;
    *available = taken < all ? all - taken : 0;
    return cudaSuccess;
}

API CUresult cuMemGetAddressRange(CUdeviceptr *start, size_t *bytes, CUdeviceptr address) {
    pthread_mutex_lock(&lock);
    const struct range *at = range_of(allocations, (void *)address);
    if (at && start) *start = (CUdeviceptr)at->start;
    if (at && bytes) *bytes = at->bytes;
    pthread_mutex_unlock(&lock);
    return at ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* ---- expandable segments: physical memory and addresses are allocated separately ---- */

struct piece { /* the target of a CUmemGenericAllocationHandle */
    size_t bytes;
    int device;
    bool mapped;
};

static size_t unmapped[MOST_DEVICES]; /* bytes of pieces without addresses */

API CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *p,
                                           CUmemAllocationGranularity_flags which) {
    *bytes = PAGE;
    return CUDA_SUCCESS;
}

API CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr hint,
                                 unsigned long long flags) {
    if (ready()) return CUDA_ERROR_NOT_INITIALIZED;
    pthread_mutex_lock(&lock);
    *address = (CUdeviceptr)reserve_addresses(current_device(), bytes);
    pthread_mutex_unlock(&lock);
    return *address ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED; /* as above */
}

API CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    if (device_of((void *)address) < 0) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    release_addresses((char *)address, bytes);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

/* torch creates all pieces of an allocation before it maps them, and reserves addresses for 9/8 of a device's memory. A
 * real device cannot satisfy a larger allocation; a virtual one with more allocatable bytes than memory refuses it
 * here, as torch would map past the end of its reservation. */
API CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *p,
                         unsigned long long flags) {
    int on = p->location.type == CU_MEM_LOCATION_TYPE_DEVICE && p->location.id < visible_count() ? p->location.id
                                                                                                 : current_device();
    pthread_mutex_lock(&lock);
    bool fits = unmapped[on] + bytes <= device()->memory / 8 * 9 && take(on, bytes);
    if (fits) unmapped[on] += bytes;
    pthread_mutex_unlock(&lock);
    if (!fits) return CUDA_ERROR_OUT_OF_MEMORY;
    struct piece *piece = malloc(sizeof *piece);
    *piece = (struct piece){bytes, on, false};
    *handle = (CUmemGenericAllocationHandle)piece;
    return CUDA_SUCCESS;
}

static void has_addresses(struct piece *piece) { /* the caller holds the lock */
    if (!piece->mapped) unmapped[piece->device] -= piece->bytes;
    piece->mapped = true;
}

API CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                      unsigned long long flags) {
    pthread_mutex_lock(&lock);
    has_addresses((struct piece *)handle);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    struct piece *piece = (struct piece *)handle;
    pthread_mutex_lock(&lock);
    has_addresses(piece);
    used[piece->device] -= piece->bytes;
    pthread_mutex_unlock(&lock);
    free(piece);
    return CUDA_SUCCESS;
}

API CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    zero((void *)address, bytes);
    know((void *)address, bytes, false);
    return CUDA_SUCCESS;
}
