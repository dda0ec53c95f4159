/* NCCL's sends and receives, which are queued until the end of a group and then run together. */
#include "nccl.h"

static const char kernel[] = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"; /* as NVIDIA names it */

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

/* Does a transfer, if the other side is as far. */
static ncclResult_t try_transfer(struct transfer *t) {
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
        m->type = t->type, m->count = t->count, m->known = known(t->data, bytes);
        if (moved(bytes, m->known)) memcpy(m->data, t->data, bytes);
        r->sent++;
        return ncclSuccess;
    }
    bool same = m->type == t->type && m->count == t->count;
    if (!same)
        fprintf(stderr,
                "virtual NCCL: calls do not match: rank %d of %d expects count %zu, type %d from rank %d, which sent "
                "count %zu, type %d\n",
                c->rank, c->ranks, t->count, t->type, t->peer, m->count, m->type);
    else if (moved(bytes, m->known) && (device_of(t->data) < 0 || writable(t->data, bytes)))
        memcpy(t->data, m->data, bytes);
    else
        zero(t->data, bytes);
    know(t->data, bytes, moved(bytes, m->known) && m->known);
    r->received++;
    return same ? ncclSuccess : ncclInvalidUsage;
}

/* Repeats all pending sends, as far as there is room, then all receives, until every transfer is done. */
static ncclResult_t carry_out(int count) {
    size_t bytes = 0;
    unsigned round = 0;
    for (int left = count; left;) {
        int before = left;
        for (int what = SEND; what <= RECEIVE; what++)
            for (int i = 0; i < count; i++) {
                struct transfer *t = &transfers[i];
                if (t->done || (int)t->what != what) continue;
                ncclResult_t error = try_transfer(t);
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
    for (int i = 0; i < count; i++) {
        const struct transfer *t = &transfers[i];
        ncclComm_t c = t->comm;
        size_t of_one = t->count * size_of(t->type);
        uint32_t *number = t->what == SEND ? &c->sent[t->peer] : &c->received[t->peer];
        struct detail detail = {.dims = {c->ranks, c->rank, t->peer}, .dtype = NUMBER_OF(t->type),
                                .operation = t->what, .sequence = (*number)++, .communicator = c->number};
        struct work one = {TRANSFER, NULL, of_one, .operation = t->what == SEND ? "send" : "recv", .detail = detail};
        count_work(&one);
        log_work(&one, stream_id(t->stream));
        bytes += of_one;
    }
    ncclComm_t c = transfers[0].comm;
    struct detail detail = {.dims = {c->ranks, c->rank, transfers[0].peer, count}, .operation = transfers[0].what,
                            .communicator = c->number};
    enqueue(transfers[0].stream,
            &(struct work){KERNEL, kernel, bytes, {2 * count, 1, 1}, {640, 1, 1}, .detail = detail});
    return ncclSuccess;
}

API ncclResult_t ncclGroupStart(void) {
    depth++;
    return ncclSuccess;
}

API ncclResult_t ncclGroupEnd(void) {
    if (depth && --depth) return ncclSuccess;
    answer_broadcasts();
    int count = pending;
    pending = 0;
    return count ? carry_out(count) : ncclSuccess;
}

static ncclResult_t transfer(enum what what, void *data, size_t count, int type, int peer, ncclComm_t c,
                             cudaStream_t stream) {
    if (peer < 0 || peer >= c->ranks) return ncclInvalidArgument;
    if (pending == MOST_TRANSFERS)
        return (ncclResult_t)unanswered("more than 4,096 transfers in a group", ncclInternalError);
    ncclGroupStart();
    transfers[pending++] = (struct transfer){what, data, count, type, peer, c, stream, false};
    return ncclGroupEnd();
}

API ncclResult_t ncclSend(const void *data, size_t count, ncclDataType_t type, int peer, ncclComm_t c,
                          cudaStream_t stream) {
    return transfer(SEND, (void *)data, count, type, peer, c, stream);
}

API ncclResult_t ncclRecv(void *data, size_t count, ncclDataType_t type, int peer, ncclComm_t c, cudaStream_t stream) {
    return transfer(RECEIVE, data, count, type, peer, c, stream);
}
