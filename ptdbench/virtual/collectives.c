/* NCCL's collectives: ranks post their data in shared memory, where it is combined. */
#include "nccl.h"

static const char *words[] = {"AllReduce", "Reduce", "ReduceScatter", "AllGather", "Broadcast",
                              "AlltoAll",  "Send",   "Recv",          "Split"};

/* The operations by the names of torch. */
static const char *operations[] = {"all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"};

/* NVIDIA's kernel names, by which trace readers recognize collectives. */
#define DEVICE_KERNEL(name) "ncclDevKernel_" name "(ncclDevKernelArgsStorage<4096ul>)"
static const char *kernels[] = {DEVICE_KERNEL("AllReduce_Sum_f32_RING_LL"),
                                DEVICE_KERNEL("Reduce_Sum_f32_RING_LL"),
                                DEVICE_KERNEL("ReduceScatter_Sum_f32_RING_LL"),
                                DEVICE_KERNEL("AllGather_RING_LL"),
                                DEVICE_KERNEL("Broadcast_RING_LL"),
                                DEVICE_KERNEL("SendRecv") /* AlltoAll */};

/* ---- reductions ---- */

API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t type,
                                          ncclScalarResidence_t where, ncclComm_t c) {
    /* device memory is host memory, so the host can read the scalar */
    for (int i = 0; i < MOST_FACTORS; i++) {
        if (c->factors[i]) continue;
        double factor = get_number(scalar, 0, type);
        c->factors[i] = factor ? factor : 5e-324; /* reads as 0 if not computed: use anything but 0, which marks free */
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
    default: return a + b; /* sum, average, and premultiplied sums */
    }
}

/* Combines the ranks' numbers, from an index on, in the order of ranks. */
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
                "virtual NCCL: calls do not match: rank %d of %d calls %s (count %zu, type %d, op %d, root %d), "
                "rank %d calls %s (count %zu, type %d, op %d, root %d)\n",
                c->rank, c->ranks, words[mine->what], mine->count, mine->type, mine->op, mine->root, rank,
                words[other->what], other->count, other->type, other->op, other->root);
        return ncclInvalidUsage;
    }
    return ncclSuccess;
}

/* Writes the result of what all ranks have posted to this rank's output. */
static void deliver(ncclComm_t c, int parity, const struct call *call, char *to) {
    size_t each = call->count * size_of(call->type), first = call->what == ALL_TO_ALL ? c->rank * each : 0;
    switch (call->what) {
    case ALL_REDUCE:
    case REDUCE: reduce(c, parity, call, 0, to); break;
    case REDUCE_SCATTER: reduce(c, parity, call, call->count * c->rank, to); break;
    case BROADCAST: memcpy(to, member(c, call->root)->slots[parity].data, each); break;
    default: /* all-gather, all-to-all */
        for (int rank = 0; rank < c->ranks; rank++)
            memcpy(to + rank * each, member(c, rank)->slots[parity].data + first, each);
    }
}

/* Whether the values of all ranks whose data a call delivers are known. */
static bool are_known(ncclComm_t c, int parity, const struct call *call) {
    bool all = true;
    for (int rank = 0; rank < c->ranks; rank++)
        if (call->what != BROADCAST || rank == call->root) all = all && member(c, rank)->slots[parity].known;
    return all;
}

static size_t sent_bytes(ncclComm_t c, const struct call *call) {
    return call->count * size_of(call->type) *
           (call->what == REDUCE_SCATTER || call->what == ALL_TO_ALL ? c->ranks : 1);
}

static size_t received_bytes(ncclComm_t c, const struct call *call) {
    return call->count * size_of(call->type) * (call->what == ALL_GATHER || call->what == ALL_TO_ALL ? c->ranks : 1);
}

/* For a lone rank: it receives what it sends, or zeros. */
static void answer_alone(ncclComm_t c, const struct call *call, const char *from, char *to) {
    size_t each = call->count * size_of(call->type), copies = call->what == ALL_GATHER ? c->ranks : 1;
    if (to == from || !to) return;
    bool are_known = known(from, each);
    bool here = moved(each, are_known) && copies * each <= MIB && writable(to, copies * each);
    if (!here) zero(to, received_bytes(c, call));
    for (size_t i = 0; here && i < copies; i++) memmove(to + i * each, from, each);
    know(to, copies * each, here && are_known);
}

/* Runs one collective call. */
ncclResult_t exchange(ncclComm_t c, const struct call *call, const void *from, char *to) {
    if (!c->shared) {
        answer_alone(c, call, from, to);
        return ncclSuccess;
    }
    uint64_t number = c->calls++;
    int parity = number & 1;
    struct member *me = member(c, c->rank);
    struct slot *mine = &me->slots[parity];
    size_t bytes = sent_bytes(c, call);
    ncclResult_t error = ncclSuccess;
    unsigned round = 0;
    /* the slot is free once all ranks have read the call before the last */
    for (int rank = 0; number >= 2 && rank < c->ranks; rank++)
        while (member(c, rank)->done < number - 1)
            if ((error = wait_once(c, &round))) return error;
    mine->call = *call;
    mine->factor = call->op >= ncclNumOps ? c->factors[call->op - ncclNumOps] : 1;
    mine->known = known(from, bytes);
    bool posts = call->what != BROADCAST || c->rank == call->root;
    if (posts && moved(bytes, mine->known)) memcpy(mine->data, from, bytes);
    me->posted = number + 1;
    round = 0;
    for (int rank = 0; rank < c->ranks; rank++)
        while (member(c, rank)->posted < number + 1)
            if ((error = wait_once(c, &round))) return error;
    error = check(c, parity, call);
    bool kept = call->what == BROADCAST && c->rank == call->root && from == to;
    bool wanted = to && !kept && (call->what != REDUCE || c->rank == call->root);
    if (!error && wanted) {
        bool all_known = are_known(c, parity, call), computed = moved(bytes, all_known);
        if (computed && (device_of(to) < 0 || writable(to, received_bytes(c, call))))
            deliver(c, parity, call, to);
        else
            zero(to, received_bytes(c, call));
        know(to, received_bytes(c, call), computed && all_known);
    }
    me->done = number + 1;
    return error;
}

static ncclResult_t collective(enum what what, const void *from, void *to, size_t count, ncclDataType_t type, int op,
                               int root, ncclComm_t c, cudaStream_t stream) {
    struct call call = {what, type, op, root, count};
    ncclResult_t error = exchange(c, &call, from, to);
    if (error) return error;
    size_t sent = sent_bytes(c, &call), received = received_bytes(c, &call), bytes = sent > received ? sent : received;
    struct detail detail = {.dims = {c->ranks, c->rank, root}, .dtype = NUMBER_OF(type), .operation = what,
                            .sequence = c->messages++, .communicator = c->number};
    enqueue(stream, &(struct work){KERNEL, kernels[what], bytes, {16, 1, 1}, {640, 1, 1}, 0,
                                   c->ranks > 1 ? operations[what] : NULL, detail});
    return ncclSuccess;
}

API ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t c, cudaStream_t stream) {
    return collective(ALL_REDUCE, from, to, count, type, op, 0, c, stream);
}

API ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                            ncclComm_t c, cudaStream_t stream) {
    return collective(REDUCE, from, to, count, type, op, root, c, stream);
}

API ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                   ncclComm_t c, cudaStream_t stream) {
    return collective(REDUCE_SCATTER, from, to, count, type, op, 0, c, stream);
}

API ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t c,
                               cudaStream_t stream) {
    return collective(ALL_GATHER, from, to, count, type, 0, 0, c, stream);
}

/* The broadcasts of a group on a lone rank. If it is the root of one of them, the other roots are taken to send the
 * same data: torch implements gathers this way since 2.15, with each rank as the root of one broadcast. */
enum { MOST_BROADCASTS = 4096 };
static __thread struct broadcast {
    ncclComm_t comm;
    bool own;
    char *data;
    size_t bytes;
} broadcasts[MOST_BROADCASTS];
static __thread int broadcast_count;

void answer_broadcasts(void) {
    for (struct broadcast *own = broadcasts; own < broadcasts + broadcast_count; own++)
        for (struct broadcast *b = broadcasts; own->own && b < broadcasts + broadcast_count; b++)
            if (!b->own && b->comm == own->comm && b->bytes == own->bytes &&
                moved(b->bytes, known(own->data, own->bytes)) && writable(b->data, b->bytes))
                memmove(b->data, own->data, b->bytes);
    broadcast_count = 0;
}

API ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t c,
                               cudaStream_t stream) {
    ncclGroupStart();
    if (!c->shared && broadcast_count < MOST_BROADCASTS) {
        bool own = root == c->rank;
        broadcasts[broadcast_count++] = (struct broadcast){c, own, own ? (char *)from : to, count * size_of(type)};
    }
    ncclResult_t error = collective(BROADCAST, from, to, count, type, 0, root, c, stream);
    ncclResult_t ended = ncclGroupEnd();
    return error ? error : ended;
}

API ncclResult_t ncclBcast(void *data, size_t count, ncclDataType_t type, int root, ncclComm_t c, cudaStream_t stream) {
    return collective(BROADCAST, data, data, count, type, 0, root, c, stream);
}

API ncclResult_t ncclAlltoAll(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t c,
                              cudaStream_t stream) {
    return collective(ALL_TO_ALL, from, to, count, type, 0, 0, c, stream);
}
