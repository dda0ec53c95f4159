/* NCCL's communicators, and the memory in which their ranks meet. */
#ifndef PTDBENCH_VIRTUAL_NCCL_H
#define PTDBENCH_VIRTUAL_NCCL_H

#include "virtual.h"

#include <nccl.h>
#include <stdatomic.h>

enum { COMPUTED = 65536, MESSAGE = 16384 }; /* bytes of a collective and of a message that are exchanged at most */
enum { RING = 64, MOST_FACTORS = 64 };      /* messages under way, and operations of one's own */

enum what { ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, ALL_TO_ALL, SEND, RECEIVE, EXCHANGE };

struct call {
    int what, type, op, root;
    size_t count;
};

/* What a rank says to the others: its call, when its stream is ready for it, and its numbers. Two slots: a rank may
 * begin the next call while others still read this one. */
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
    struct shared *shared;        /* NULL: one rank, or alone */
    double factors[MOST_FACTORS]; /* of operations made with ncclRedOpCreatePreMulSum; 0: free */
    ncclUniqueId id;
};

static inline struct member *member(ncclComm_t c, int rank) { return (struct member *)(c->shared + 1) + rank; }
static inline struct ring *ring(ncclComm_t c, int from, int to) {
    return (struct ring *)member(c, c->ranks) + from * c->ranks + to;
}
static inline size_t shared_bytes(size_t ranks) {
    return sizeof(struct shared) + ranks * sizeof(struct member) + ranks * ranks * sizeof(struct ring);
}

/* nccl.c */
ncclResult_t wait_once(ncclComm_t c, unsigned *round); /* one round of waiting for another process */

/* collectives.c: one call of all ranks; `start` becomes when the last of their streams is ready for it. */
ncclResult_t exchange(ncclComm_t c, const struct call *call, const void *from, char *to, double *start);

/* collectives.c: the end of a group, for a rank without the others */
void answer_broadcasts(void);

/* How long messages take. */
enum { LATENCY = 15000 }; /* nanoseconds */
static inline double link_rate(void) {
    return device()->link ? device()->link : 25e9; /* PCIe of the fourth generation */
}
static inline double ready_time(cudaStream_t stream) { return stream_end(stream) > now() ? stream_end(stream) : now(); }

#endif
