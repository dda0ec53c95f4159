/* NCCL's communicators, and the memory that their ranks share. */
#ifndef PTDBENCH_VIRTUAL_NCCL_H
#define PTDBENCH_VIRTUAL_NCCL_H

#include "virtual.h"

#include <nccl.h>
#include <stdatomic.h>

enum { COMPUTED = 65536, KNOWN = MIB }; /* maximum bytes exchanged, and if their values are known, such as objects */
enum { RING = 64, MOST_FACTORS = 64 };  /* messages in flight, and user-defined operations */

enum what { ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, ALL_TO_ALL, SEND, RECEIVE, EXCHANGE };

struct call {
    int what, type, op, root;
    size_t count;
};

/* What a rank posts for the others: its call and its data. Two slots, as a rank may begin the next call while others
 * still read this one. */
struct slot {
    struct call call;
    bool known; /* the data's values */
    double factor;
    char data[KNOWN];
};
struct member {
    _Atomic uint64_t posted, done;
    struct slot slots[2];
};

struct message {
    int type;
    size_t count;
    bool known;
    char data[KNOWN];
};
struct ring { /* from one rank to another */
    _Atomic uint64_t sent, received;
    struct message messages[RING];
};

struct shared { /* followed by a member for each rank and a ring for each ordered pair */
    _Alignas(4096) _Atomic int attached;
};

struct ncclComm {
    int ranks, rank;
    volatile int aborted;
    uint64_t calls;
    struct shared *shared;        /* NULL: one rank, or alone */
    double factors[MOST_FACTORS]; /* of operations created by ncclRedOpCreatePreMulSum; 0: free */
    ncclUniqueId id;
    uint64_t number;                 /* the same on all ranks; for the log, as is what follows */
    uint32_t messages, splits;       /* so far */
    uint32_t *sent, *received;       /* to and from each rank */
};

static inline struct member *member(ncclComm_t c, int rank) { return (struct member *)(c->shared + 1) + rank; }
static inline struct ring *ring(ncclComm_t c, int from, int to) {
    return (struct ring *)member(c, c->ranks) + from * c->ranks + to;
}
static inline size_t shared_bytes(size_t ranks) {
    return sizeof(struct shared) + ranks * sizeof(struct member) + ranks * ranks * sizeof(struct ring);
}

/* Whether data are moved: otherwise they arrive as zeros. */
static inline bool moved(size_t bytes, bool are_known) { return bytes <= (are_known ? KNOWN : COMPUTED); }

/* nccl.c */
ncclResult_t wait_once(ncclComm_t c, unsigned *round); /* one round of waiting for another process */

/* collectives.c: one collective call */
ncclResult_t exchange(ncclComm_t c, const struct call *call, const void *from, char *to);

/* collectives.c: the end of a group, for a lone rank */
void answer_broadcasts(void);

#endif
