/* NCCL between ranks of one machine. Small data are exchanged through shared memory, with all types and reductions;
 * larger data are not moved and arrive as zeros. Mismatched calls are errors on all ranks of the communicator.
 *
 * The host waits for the other ranks, where with NCCL a stream would wait: an order of calls that works only on an
 * asynchronous device hangs here. The shared memory has no name (memfd_create), so it is freed when the processes end,
 * however they end.
 */
#include "nccl.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

ncclResult_t wait_once(ncclComm_t c, unsigned *round) {
    if (c->aborted) return ncclInvalidUsage;
    if (++*round < 20)
        sched_yield();
    else
        usleep(*round < 200 ? 50 : 500);
    return ncclSuccess;
}

/* ---- communicators ---- */

API ncclResult_t ncclGetVersion(int *version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }

/* The id names an open file of this process, which all ranks map. */
API ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    int file = memfd_create("virtual NCCL", MFD_CLOEXEC);
    if (file < 0) {
        perror("virtual NCCL: no shared memory");
        return ncclSystemError;
    }
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "virtual %d %d %.0f", getpid(), file, now());
    return ncclSuccess;
}

static ncclResult_t map_shared(ncclComm_t c) {
    int process, file;
    char path[64];
    if (sscanf(c->id.internal, "virtual %d %d", &process, &file) != 2) return ncclInvalidArgument;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", process, file);
    int opened = open(path, O_RDWR | O_CLOEXEC);
    if (opened < 0 || ftruncate(opened, shared_bytes(c->ranks))) {
        fprintf(stderr, "virtual NCCL: rank %d does not reach process %d, where the ranks meet: %m\n", c->rank,
                process);
        return ncclSystemError;
    }
    c->shared = mmap(NULL, shared_bytes(c->ranks), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, opened, 0);
    close(opened);
    if (c->shared == MAP_FAILED) {
        c->shared = NULL;
        return ncclSystemError;
    }
    c->shared->attached++;
    for (unsigned round = 0; c->shared->attached < c->ranks;) {
        ncclResult_t error = wait_once(c, &round);
        if (error) return error;
    }
    if (process == getpid()) close(file); /* all ranks have mapped it */
    return ncclSuccess;
}

static ncclResult_t join(ncclComm_t *joined, int ranks, int rank, const ncclUniqueId *id) {
    if (ready()) return ncclUnhandledCudaError;
    ncclComm_t c = calloc(1, sizeof *c);
    c->ranks = ranks, c->rank = rank, c->id = *id;
    c->sent = calloc(2 * ranks, sizeof *c->sent), c->received = c->sent + ranks;
    c->number = 1469598103934665603; /* by FNV-1a, of an id that ends with 0 */
    for (const char *at = id->internal; *at; at++) c->number = (c->number ^ (uint8_t)*at) * 1099511628211;
    *joined = c; /* before waiting for the others: another thread may abort it */
    return ranks == 1 || alone() ? ncclSuccess : map_shared(c);
}

API ncclResult_t ncclCommInitRankConfig(ncclComm_t *joined, int ranks, ncclUniqueId id, int rank,
                                        ncclConfig_t *config) {
    return join(joined, ranks, rank, &id);
}

API ncclResult_t ncclCommInitRank(ncclComm_t *joined, int ranks, ncclUniqueId id, int rank) {
    return join(joined, ranks, rank, &id);
}

API ncclResult_t ncclCommInitRankScalable(ncclComm_t *joined, int ranks, int rank, int count, ncclUniqueId *ids,
                                          ncclConfig_t *config) {
    return join(joined, ranks, rank, ids);
}

API ncclResult_t ncclCommCount(const ncclComm_t c, int *ranks) { return *ranks = c->ranks, ncclSuccess; }
API ncclResult_t ncclCommUserRank(const ncclComm_t c, int *rank) { return *rank = c->rank, ncclSuccess; }
API ncclResult_t ncclCommCuDevice(const ncclComm_t c, int *number) { return *number = current_device(), ncclSuccess; }
API ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *error) { return *error = ncclSuccess, ncclSuccess; }
API ncclResult_t ncclCommFinalize(ncclComm_t c) { return ncclSuccess; }

/* An aborted communicator is not freed, as a thread may be waiting in it. */
API ncclResult_t ncclCommAbort(ncclComm_t c) {
    c->aborted = 1;
    return ncclSuccess;
}

API ncclResult_t ncclCommDestroy(ncclComm_t c) {
    if (c->shared) munmap(c->shared, shared_bytes(c->ranks));
    free(c->sent);
    free(c);
    return ncclSuccess;
}

API const char *ncclGetErrorString(ncclResult_t error) { return error ? "virtual NCCL: error" : "no error"; }
API const char *ncclGetLastError(ncclComm_t c) { return ""; }

API ncclResult_t ncclMemAlloc(void **address, size_t bytes) {
    return cudaMalloc(address, bytes) ? ncclUnhandledCudaError : ncclSuccess;
}
API ncclResult_t ncclMemFree(void *address) { return cudaFree(address) ? ncclUnhandledCudaError : ncclSuccess; }

/* ---- splitting: all ranks exchange color and key, then the first rank of each color sends the new id ---- */

enum { MOST_RANKS = 512 };

API ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t *part, ncclConfig_t *config) {
    int32_t mine[2] = {color, key}, all[2 * MOST_RANKS];
    ncclUniqueId id = c->id, ids[MOST_RANKS];
    *part = NULL;
    if (!c->shared) { /* a lone rank does not know the size of its part: take all */
        snprintf(strchr(id.internal, 0), sizeof id.internal - strlen(id.internal), "/%u", c->splits++);
        return join(part, c->ranks, key < c->ranks ? key : 0, &id);
    }
    if (c->ranks > MOST_RANKS) return ncclInvalidArgument;
    ncclResult_t error = exchange(c, &(struct call){EXCHANGE, ncclInt32, 0, 0, 2}, mine, (char *)all);
    if (error) return error;
    int ranks = 0, rank = 0, first = -1;
    for (int i = 0; i < c->ranks; i++) {
        if (all[2 * i] != color) continue;
        ranks++;
        rank += all[2 * i + 1] < key || (all[2 * i + 1] == key && i < c->rank);
        if (first < 0 || all[2 * i + 1] < all[2 * first + 1]) first = i;
    }
    if (color >= 0 && first == c->rank && (error = ncclGetUniqueId(&id))) return error;
    error = exchange(c, &(struct call){EXCHANGE, ncclInt8, 0, 0, sizeof id}, &id, (char *)ids);
    return error || color < 0 ? error : join(part, ranks, rank, &ids[first]);
}
