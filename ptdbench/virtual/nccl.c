/* NCCL between ranks of one machine. What is small is exchanged through shared memory, with all types and reductions; what is larger than
 * COMPUTED moves nothing and arrives as zeros. Calls that do not match are errors of all ranks of the communicator.
 *
 * The host waits for the others, where NCCL would let a stream wait: an order of calls that only an asynchronous device tolerates hangs here.
 * The shared memory has no name (memfd_create): it ends with the processes, however they end.
 */
#include "virtual.h"

#include <fcntl.h>
#include <nccl.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

enum { COMPUTED = 65536, MESSAGE = 16384, RING = 64, MOST_FACTORS = 64 };

enum what { ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, ALL_TO_ALL, SEND, RECEIVE, EXCHANGE };
static const char *words[] = {"AllReduce", "Reduce", "ReduceScatter", "AllGather", "Broadcast", "AlltoAll", "Send", "Recv", "Split"};

/* NVIDIA's names of kernels, by which traces are read. */
#define DEVICE_KERNEL(name) "ncclDevKernel_" name "(ncclDevKernelArgsStorage<4096ul>)"
static const char *kernels[] = {DEVICE_KERNEL("AllReduce_Sum_f32_RING_LL"), DEVICE_KERNEL("Reduce_Sum_f32_RING_LL"),
                                DEVICE_KERNEL("ReduceScatter_Sum_f32_RING_LL"), DEVICE_KERNEL("AllGather_RING_LL"),
                                DEVICE_KERNEL("Broadcast_RING_LL"), DEVICE_KERNEL("SendRecv"), DEVICE_KERNEL("SendRecv"),
                                DEVICE_KERNEL("SendRecv")};

struct call {
    int what, type, op, root;
    size_t count;
};

/* What a rank says to the others: its call, when its stream is ready for it, and its numbers. Two slots: a rank may begin the next call
 * while others still read this one. */
struct slot {
    struct call call;
    double ready, factor;
    char data[COMPUTED];
};
struct member {
    _Atomic uint64_t posted, done;
    struct slot slots[2];
};

struct message {
    int type;
    size_t count;
    double ready;
    char data[MESSAGE];
};
struct ring { /* from one rank to another */
    _Atomic uint64_t sent, received;
    struct message messages[RING];
};

struct shared { /* then a member for each rank, then a ring for each pair */
    _Alignas(4096) _Atomic int attached;
};

struct ncclComm {
    int ranks, rank;
    volatile int aborted;
    uint64_t calls;
    struct shared *shared; /* NULL: one rank, or alone */
    double factors[MOST_FACTORS]; /* of operations made with ncclRedOpCreatePreMulSum; 0: free */
    ncclUniqueId id;
};

static struct member *member(ncclComm_t c, int rank) { return (struct member *)(c->shared + 1) + rank; }
static struct ring *ring(ncclComm_t c, int from, int to) { return (struct ring *)member(c, c->ranks) + from * c->ranks + to; }
static size_t shared_bytes(size_t ranks) {
    return sizeof(struct shared) + ranks * sizeof(struct member) + ranks * ranks * sizeof(struct ring);
}

/* One round of waiting for another process. */
static ncclResult_t wait_once(ncclComm_t c, unsigned *round) {
    if (c->aborted) return ncclInvalidUsage;
    if (++*round < 20) sched_yield();
    else usleep(*round < 200 ? 50 : 500);
    return ncclSuccess;
}

/* ---- communicators ---- */

API ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

/* The id names an open file of this process, in which all ranks meet. */
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
        fprintf(stderr, "virtual NCCL: rank %d does not reach process %d, where the ranks meet: %m\n", c->rank, process);
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
    if (process == getpid()) close(file); /* all have it mapped */
    return ncclSuccess;
}

static ncclResult_t join(ncclComm_t *joined, int ranks, int rank, const ncclUniqueId *id) {
    if (ready()) return ncclUnhandledCudaError;
    ncclComm_t c = calloc(1, sizeof *c);
    c->ranks = ranks, c->rank = rank, c->id = *id;
    *joined = c; /* before the others are there: another thread may abort it */
    note("nccl init rank %d of %d: %s\n", rank, ranks, id->internal);
    return ranks == 1 || alone() ? ncclSuccess : map_shared(c);
}

API ncclResult_t ncclCommInitRankConfig(ncclComm_t *joined, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
    (void)config;
    return join(joined, ranks, rank, &id);
}

API ncclResult_t ncclCommInitRank(ncclComm_t *joined, int ranks, ncclUniqueId id, int rank) { return join(joined, ranks, rank, &id); }

API ncclResult_t ncclCommInitRankScalable(ncclComm_t *joined, int ranks, int rank, int count, ncclUniqueId *ids, ncclConfig_t *config) {
    (void)count, (void)config;
    return join(joined, ranks, rank, ids);
}

API ncclResult_t ncclCommCount(const ncclComm_t c, int *ranks) {
    *ranks = c->ranks;
    return ncclSuccess;
}

API ncclResult_t ncclCommUserRank(const ncclComm_t c, int *rank) {
    *rank = c->rank;
    return ncclSuccess;
}

API ncclResult_t ncclCommCuDevice(const ncclComm_t c, int *number) {
    (void)c;
    *number = current_device();
    return ncclSuccess;
}

API ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *error) {
    (void)c;
    *error = ncclSuccess;
    return ncclSuccess;
}

API ncclResult_t ncclCommFinalize(ncclComm_t c) {
    (void)c;
    return ncclSuccess;
}

/* A thread may be waiting in it, so that an aborted one stays in memory. */
API ncclResult_t ncclCommAbort(ncclComm_t c) {
    c->aborted = 1;
    note("nccl abort %s\n", c->id.internal);
    return ncclSuccess;
}

API ncclResult_t ncclCommDestroy(ncclComm_t c) {
    note("nccl destroy %s\n", c->id.internal);
    if (c->shared) munmap(c->shared, shared_bytes(c->ranks));
    free(c);
    return ncclSuccess;
}

API const char *ncclGetErrorString(ncclResult_t error) { return error ? "virtual NCCL: error" : "no error"; }

API const char *ncclGetLastError(ncclComm_t c) {
    (void)c;
    return "";
}

API ncclResult_t ncclMemAlloc(void **address, size_t bytes) { return cudaMalloc(address, bytes) ? ncclUnhandledCudaError : ncclSuccess; }
API ncclResult_t ncclMemFree(void *address) { return cudaFree(address) ? ncclUnhandledCudaError : ncclSuccess; }

/* ---- reductions ---- */

API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t type, ncclScalarResidence_t where, ncclComm_t c) {
    (void)where; /* a device's memory is the host's */
    for (int i = 0; i < MOST_FACTORS; i++) {
        if (c->factors[i]) continue;
        double factor = get_number(scalar, 0, type);
        c->factors[i] = factor ? factor : 5e-324; /* not computed there: anything but free */
        *op = (ncclRedOp_t)(ncclNumOps + i);
        return ncclSuccess;
    }
    return ncclInvalidUsage;
}

API ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t c) {
    if (op < ncclNumOps || op >= ncclNumOps + MOST_FACTORS) return ncclInvalidArgument;
    c->factors[op - ncclNumOps] = 0;
    return ncclSuccess;
}

static double combine(int op, double a, double b) {
    switch (op) {
        case ncclProd: return a * b;
        case ncclMax: return b > a ? b : a;
        case ncclMin: return b < a ? b : a;
        default: return a + b; /* sum, average, and sums of what was multiplied before */
    }
}

/* Numbers of the ranks from an index on, combined in their order. */
static void reduce(ncclComm_t c, int parity, const struct call *call, size_t from, char *result) {
    for (size_t i = 0; i < call->count; i++) {
        double value = 0;
        for (int rank = 0; rank < c->ranks; rank++) {
            const struct slot *s = &member(c, rank)->slots[parity];
            double one = get_number(s->data, from + i, call->type) * (call->op >= ncclNumOps ? s->factor : 1);
            value = rank ? combine(call->op, value, one) : one;
        }
        put_number(result, i, call->type, call->op == ncclAvg ? value / c->ranks : value);
    }
}

/* ---- collectives ---- */

static bool matches(const struct call *a, const struct call *b) {
    int op_a = a->op < ncclNumOps ? a->op : ncclNumOps, op_b = b->op < ncclNumOps ? b->op : ncclNumOps;
    return a->what == b->what && a->type == b->type && op_a == op_b && a->root == b->root && a->count == b->count;
}

static ncclResult_t check(ncclComm_t c, int parity, const struct call *mine) {
    for (int rank = 0; rank < c->ranks; rank++) {
        const struct call *other = &member(c, rank)->slots[parity].call;
        if (matches(mine, other)) continue;
        fprintf(stderr,
                "virtual NCCL: calls do not match: rank %d of %d calls %s (count %zu, type %d, op %d, root %d), rank %d calls %s (count %zu, "
                "type %d, op %d, root %d)\n",
                c->rank, c->ranks, words[mine->what], mine->count, mine->type, mine->op, mine->root, rank, words[other->what], other->count,
                other->type, other->op, other->root);
        return ncclInvalidUsage;
    }
    return ncclSuccess;
}

/* Puts what all have posted where this rank wants it. */
static void deliver(ncclComm_t c, int parity, const struct call *call, const void *from, char *to) {
    size_t each = call->count * size_of(call->type);
    const struct slot *root = &member(c, call->root)->slots[parity];
    switch (call->what) {
        case ALL_REDUCE: reduce(c, parity, call, 0, to); break;
        case REDUCE_SCATTER: reduce(c, parity, call, call->count * c->rank, to); break;
        case REDUCE:
            if (c->rank == call->root) reduce(c, parity, call, 0, to);
            break;
        case BROADCAST:
            if (c->rank != call->root || from != to) memcpy(to, root->data, each);
            break;
        case ALL_TO_ALL:
            for (int rank = 0; rank < c->ranks; rank++) memcpy(to + rank * each, member(c, rank)->slots[parity].data + c->rank * each, each);
            break;
        default: /* gathered */
            for (int rank = 0; rank < c->ranks; rank++) memcpy(to + rank * each, member(c, rank)->slots[parity].data, each);
    }
}

static size_t sent_bytes(ncclComm_t c, const struct call *call) {
    return call->count * size_of(call->type) * (call->what == REDUCE_SCATTER || call->what == ALL_TO_ALL ? c->ranks : 1);
}

static size_t received_bytes(ncclComm_t c, const struct call *call) {
    return call->count * size_of(call->type) * (call->what == ALL_GATHER || call->what == ALL_TO_ALL ? c->ranks : 1);
}

/* A rank without the others: what it would get is what it sends, or zeros. */
static void answer_alone(ncclComm_t c, const struct call *call, const char *from, char *to) {
    size_t each = call->count * size_of(call->type), copies = call->what == ALL_GATHER ? c->ranks : 1;
    if (to == from || !to) return;
    if (each > COMPUTED || copies * each > MIB || !writable(to, copies * each)) zero(to, received_bytes(c, call));
    else
        for (size_t i = 0; i < copies; i++) memmove(to + i * each, from, each);
}

/* Carries out one call of all ranks; `start` becomes when the last of their streams is ready for it. */
static ncclResult_t exchange(ncclComm_t c, const struct call *call, const void *from, char *to, double *start) {
    if (!c->shared) {
        answer_alone(c, call, from, to);
        return ncclSuccess;
    }
    uint64_t number = c->calls++;
    int parity = number & 1;
    struct member *me = member(c, c->rank);
    struct slot *mine = &me->slots[parity];
    size_t bytes = sent_bytes(c, call);
    bool computed = bytes <= COMPUTED;
    ncclResult_t error = ncclSuccess;
    unsigned round = 0;
    for (int rank = 0; number >= 2 && rank < c->ranks; rank++) /* the slot is free when all have read the call before the last */
        while (member(c, rank)->done < number - 1)
            if ((error = wait_once(c, &round))) return error;
    mine->call = *call, mine->ready = *start;
    mine->factor = call->op >= ncclNumOps ? c->factors[call->op - ncclNumOps] : 1;
    if (computed && (call->what != BROADCAST || c->rank == call->root)) memcpy(mine->data, from, bytes);
    me->posted = number + 1;
    round = 0;
    for (int rank = 0; rank < c->ranks; rank++) {
        while (member(c, rank)->posted < number + 1)
            if ((error = wait_once(c, &round))) return error;
        if (member(c, rank)->slots[parity].ready > *start) *start = member(c, rank)->slots[parity].ready;
    }
    error = check(c, parity, call);
    bool kept = call->what == BROADCAST && c->rank == call->root && from == to;
    bool wanted = to && !kept && (call->what != REDUCE || c->rank == call->root);
    if (!error && wanted) {
        bool here = device_of(to) < 0 || writable(to, received_bytes(c, call));
        if (computed && here) deliver(c, parity, call, from, to);
        else zero(to, received_bytes(c, call));
    }
    me->done = number + 1;
    return error;
}

enum { LATENCY = 15000 }; /* nanoseconds */

static double link_rate(void) { return device()->link ? device()->link : 25e9; /* PCIe of the fourth generation */ }

static ncclResult_t collective(enum what what, const void *from, void *to, size_t count, ncclDataType_t type, int op, int root, ncclComm_t c,
                               cudaStream_t stream) {
    struct call call = {what, type, op, root, count};
    double start = stream_end(stream) > now() ? stream_end(stream) : now();
    note("nccl %s count %zu type %d op %d root %d ranks %d stream %u\n", words[what], count, type, op, root, c->ranks, stream_id(stream));
    ncclResult_t error = exchange(c, &call, from, to, &start);
    if (error) return error;
    size_t sent = sent_bytes(c, &call), received = received_bytes(c, &call), bytes = sent > received ? sent : received;
    /* a ring: (n - 1)/n of all bytes pass each link, twice in an all-reduce */
    double moved = bytes * (what == ALL_REDUCE ? 2.0 : 1.0) * (c->ranks - 1) / c->ranks;
    start_not_before(stream, start);
    enqueue(stream, &(struct work){KERNEL, kernels[what], LATENCY + moved / link_rate() * 1e9, bytes, {16, 1, 1}, {640, 1, 1}});
    return ncclSuccess;
}

API ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t c, cudaStream_t stream) {
    return collective(ALL_REDUCE, from, to, count, type, op, 0, c, stream);
}

API ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t c,
                            cudaStream_t stream) {
    return collective(REDUCE, from, to, count, type, op, root, c, stream);
}

API ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t c,
                                   cudaStream_t stream) {
    return collective(REDUCE_SCATTER, from, to, count, type, op, 0, c, stream);
}

API ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t c, cudaStream_t stream) {
    return collective(ALL_GATHER, from, to, count, type, 0, 0, c, stream);
}

API ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t c, cudaStream_t stream) {
    return collective(BROADCAST, from, to, count, type, 0, root, c, stream);
}

API ncclResult_t ncclBcast(void *data, size_t count, ncclDataType_t type, int root, ncclComm_t c, cudaStream_t stream) {
    return collective(BROADCAST, data, data, count, type, 0, root, c, stream);
}

API ncclResult_t ncclAlltoAll(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t c, cudaStream_t stream) {
    return collective(ALL_TO_ALL, from, to, count, type, 0, 0, c, stream);
}

/* ---- splitting: all ranks tell color and key, then the first of each color where its ranks meet ---- */

enum { MOST_RANKS = 512 };

API ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t *part, ncclConfig_t *config) {
    (void)config;
    int32_t mine[2] = {color, key}, all[2 * MOST_RANKS];
    ncclUniqueId id = c->id, ids[MOST_RANKS];
    double start = 0;
    *part = NULL;
    note("nccl split color %d key %d of %s\n", color, key, c->id.internal);
    if (!c->shared) return join(part, c->ranks, key < c->ranks ? key : 0, &id); /* how many there are the others would have to say */
    if (c->ranks > MOST_RANKS) return ncclInvalidArgument;
    ncclResult_t error = exchange(c, &(struct call){EXCHANGE, ncclInt32, 0, 0, 2}, mine, (char *)all, &start);
    if (error) return error;
    int ranks = 0, rank = 0, first = -1;
    for (int i = 0; i < c->ranks; i++) {
        if (all[2 * i] != color) continue;
        ranks++;
        rank += all[2 * i + 1] < key || (all[2 * i + 1] == key && i < c->rank);
        if (first < 0 || all[2 * i + 1] < all[2 * first + 1]) first = i;
    }
    if (color >= 0 && first == c->rank && (error = ncclGetUniqueId(&id))) return error;
    error = exchange(c, &(struct call){EXCHANGE, ncclInt8, 0, 0, sizeof id}, &id, (char *)ids, &start);
    return error || color < 0 ? error : join(part, ranks, rank, &ids[first]);
}

/* ---- sends and receives, which wait for the end of a group ---- */

struct transfer {
    enum what what;
    void *data;
    size_t count;
    int type, peer;
    ncclComm_t comm;
    cudaStream_t stream;
    bool done;
};

enum { MOST_TRANSFERS = 4096 };
static __thread struct transfer transfers[MOST_TRANSFERS];
static __thread int pending, depth;

/* Tries a transfer; `start` becomes when both sides are ready for it. */
static ncclResult_t try_transfer(struct transfer *t, double *start) {
    ncclComm_t c = t->comm;
    size_t bytes = t->count * size_of(t->type);
    if (!c->shared) {
        t->done = true;
        return ncclSuccess;
    }
    bool sends = t->what == SEND;
    struct ring *r = sends ? ring(c, c->rank, t->peer) : ring(c, t->peer, c->rank);
    if (sends ? r->sent - r->received >= RING : r->sent == r->received) return ncclSuccess;
    struct message *m = &r->messages[(sends ? r->sent : r->received) % RING];
    t->done = true;
    if (sends) {
        m->type = t->type, m->count = t->count, m->ready = *start;
        if (bytes <= MESSAGE) memcpy(m->data, t->data, bytes);
        r->sent++;
        return ncclSuccess;
    }
    bool same = m->type == t->type && m->count == t->count;
    if (!same)
        fprintf(stderr, "virtual NCCL: calls do not match: rank %d of %d expects count %zu, type %d from rank %d, which sent count %zu, type %d\n",
                c->rank, c->ranks, t->count, t->type, t->peer, m->count, m->type);
    else if (bytes <= MESSAGE && (device_of(t->data) < 0 || writable(t->data, bytes))) memcpy(t->data, m->data, bytes);
    else zero(t->data, bytes);
    if (m->ready > *start) *start = m->ready;
    r->received++;
    return same ? ncclSuccess : ncclInvalidUsage;
}

/* Sends first, where there is room, and over again until all have arrived. */
static ncclResult_t carry_out(int count) {
    double start = stream_end(transfers[0].stream) > now() ? stream_end(transfers[0].stream) : now();
    size_t bytes = 0;
    unsigned round = 0;
    for (int left = count; left;) {
        int before = left;
        for (int what = SEND; what <= RECEIVE; what++)
            for (int i = 0; i < count; i++) {
                struct transfer *t = &transfers[i];
                if (t->done || (int)t->what != what) continue;
                ncclResult_t error = try_transfer(t, &start);
                if (error) return error;
                left -= t->done;
            }
        if (left != before) continue;
        for (int i = 0; i < count; i++) {
            ncclResult_t error = transfers[i].done ? ncclSuccess : wait_once(transfers[i].comm, &round);
            if (error) return error;
            if (!transfers[i].done) break;
        }
    }
    for (int i = 0; i < count; i++) bytes += transfers[i].count * size_of(transfers[i].type);
    start_not_before(transfers[0].stream, start);
    enqueue(transfers[0].stream, &(struct work){KERNEL, kernels[SEND], LATENCY + bytes / link_rate() * 1e9, bytes, {2 * count, 1, 1}, {640, 1, 1}});
    return ncclSuccess;
}

API ncclResult_t ncclGroupStart(void) {
    depth++;
    return ncclSuccess;
}

API ncclResult_t ncclGroupEnd(void) {
    if (depth && --depth) return ncclSuccess;
    int count = pending;
    pending = 0;
    return count ? carry_out(count) : ncclSuccess;
}

static ncclResult_t transfer(enum what what, void *data, size_t count, int type, int peer, ncclComm_t c, cudaStream_t stream) {
    note("nccl %s count %zu type %d peer %d ranks %d stream %u\n", words[what], count, type, peer, c->ranks, stream_id(stream));
    if (peer < 0 || peer >= c->ranks) return ncclInvalidArgument;
    if (pending == MOST_TRANSFERS) return (ncclResult_t)unanswered("more than 4,096 transfers in a group", ncclInternalError);
    ncclGroupStart();
    transfers[pending++] = (struct transfer){what, data, count, type, peer, c, stream, false};
    return ncclGroupEnd();
}

API ncclResult_t ncclSend(const void *data, size_t count, ncclDataType_t type, int peer, ncclComm_t c, cudaStream_t stream) {
    return transfer(SEND, (void *)data, count, type, peer, c, stream);
}

API ncclResult_t ncclRecv(void *data, size_t count, ncclDataType_t type, int peer, ncclComm_t c, cudaStream_t stream) {
    return transfer(RECEIVE, data, count, type, peer, c, stream);
}
