/* Declarations shared by the sources of the virtual GPU.
 *
 * Types and signatures are those of NVIDIA's headers, so a call that changes in a new CUDA is a compile error. Names
 * declared here are hidden in the library; API exports what torch, Triton and NVIDIA's own libraries call.
 */
#ifndef PTDBENCH_VIRTUAL_H
#define PTDBENCH_VIRTUAL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
/* Signatures are NVIDIA's, and most functions use few of their arguments. */
#pragma GCC diagnostic ignored "-Wunused-parameter"
/* A struct says only what is not 0. */
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Skip the headers of C++ half precision types, which the wheels lack; nothing below needs these types. */
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#include <cuda.h>
#include <cuda_runtime_api.h>

#define API __attribute__((visibility("default")))
#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)
#define HOST_PAGE (4 * KIB)
#define MOST_DEVICES 128

static inline size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

/* device.c: the GPU model, the devices that the process sees, and which process may use them. */
struct device {
    char name[128];
    size_t memory, allocatable, context, l2, shared_memory; /* bytes, like all sizes */
    int major, minor, multiprocessors, bus_width;
    double link;                /* bytes/s */
    double clock, memory_clock; /* Hz */
    double power;               /* W */
};
const struct device *device(void);
int machine_count(void);   /* devices of the machine */
int visible_count(void);   /* devices visible according to CUDA_VISIBLE_DEVICES */
int physical(int visible); /* a visible device's index in the machine */
int current_device(void);
cudaError_t usable(void);              /* whether this process may use CUDA */
cudaError_t ready(void);               /* the same; called wherever a device is needed, which gets a context */
int has_context(int number);           /* whether this process has a context on a device */
cudaError_t failed(cudaError_t error); /* returns the error, and keeps it for cudaGetLastError */
bool alone(void);                      /* this is a single rank of many: messages are discarded */
bool computes(const char *kind);       /* whether kernels of a kind are computed, see computed.py */
int unanswered(const char *name, int status); /* reports an unimplemented call once; returns its status */

/* memory.c */
struct range {
    char *start;
    size_t bytes;
    int device;
    struct range *next;
    bool ours; /* pinned host memory that was allocated here, rather than registered by its owner */
};
struct range *take_out(struct range **list, const void *start);  /* the range that starts there, or NULL */
struct range *range_of(struct range *list, const void *address); /* the range that an address is in, or NULL */
int device_of(const void *address);               /* -1: not on a device */
size_t peak_of_device(int number);                /* most bytes in use at once, the context included */
bool readable(const void *address, size_t bytes); /* the whole range is on one device */
bool writable(void *address, size_t bytes);       /* readable, and host memory may back it */
bool backed_at(const void *address);              /* host memory backs it: it may be something else than zeros */
void zero(void *address, size_t bytes);           /* device memory; releases the backing host memory */
void forget(char *address, size_t bytes);         /* the same for any memory from map */
void *map(void *where, size_t bytes);             /* host memory that is not committed until it is written */

/* streams.c */
enum work_kind { KERNEL, COPY, SET, TRANSFER }; /* the last one only in the log: a message carries it out */
enum { DIMS = 8 };
#define NUMBER_OF(type) ((type) + 1) /* dtypes in the log: NCCL's numbers and those below, plus 1; 0 is unknown */
enum { FP8_NUMBER = 10, TF32_NUMBER = 12 };
enum { GUESSED = 1, CAUSAL = 2, ACCUMULATES = 4 }; /* flags: bytes are a guess; half of an attention; beta is not 0 */
struct detail {                                    /* what costs depend on, for the log; log.py describes it */
    int32_t dims[DIMS];
    uint8_t flags, dtype, result, layout, operation;
    uint32_t sequence;
    uint64_t communicator; /* 0: no message */
};
struct work {
    enum work_kind kind;
    const char *name; /* lives as long as the process */
    size_t bytes;
    dim3 grid, block;
    double flops; /* of products */
    const char *operation; /* of a message with these bytes; lives as long as the process */
    struct detail detail;
};
void enqueue(cudaStream_t stream, const struct work *work);
unsigned stream_id(cudaStream_t stream);
double now(void);                          /* nanoseconds since 1970, as in torch's profiler */
cudaGraph_t captures(cudaStream_t stream); /* the graph that the stream captures, if any */
void set_capture(cudaStream_t stream, cudaGraph_t graph);
void end_capture(cudaGraph_t graph); /* on all streams */

/* log.c */
void log_work(const struct work *work, unsigned stream);
void log_call(char kind, unsigned stream, uint64_t object); /* of a kind in log.py, with the number of an event */
void count_operator(void);                                  /* torch has begun one in this thread */

/* kernels.c */
const char *demangled(const char *name); /* lives as long as the process */

/* products.c */
const char *kept(const char *text); /* interned: lives as long as the process */
void describe_grouped(struct work *work); /* if it is the kernel of a product of groups */

/* graphs.c */
void capture(cudaGraph_t graph, const struct work *work);

/* computed.c */
struct recipe; /* what a kernel's name reveals */
const struct recipe *recognise(const char *readable_name);
void compute(const struct recipe *recipe, void **arguments);

/* bytes.c */
struct family; /* what a kernel's name reveals of the bytes that it reads and writes */
const struct family *family_of(const char *readable_name);
size_t bytes_of_call(const struct family *family, void **arguments, dim3 grid, dim3 block, struct detail *detail);

/* cudnn.c */
enum { BATCH, HEADS, QUERIES, WIDTH, KEYS, KEY_HEADS, PRODUCTS, VALUE_WIDTH }; /* places in an attention's dims */
size_t attention_bytes(const struct detail *attention);

/* numbers.c: elements of an array, by NCCL's type numbers. */
double get_number(const void *array, size_t at, int type);
void put_number(void *array, size_t at, int type, double value);
size_t size_of(int type);

/* known.c */
void know(const void *address, size_t bytes, bool is); /* the values there are known from now on, or not */
bool known(const void *address, size_t bytes);         /* also anything that is not on a device */

/* account.c */
void count_work(const struct work *work);
void count_copy(bool to_device, size_t bytes); /* between the host and a device */

/* cupti.c: records for torch's profiler. */
void record_work(const struct work *work, cudaStream_t stream);
enum { MEMCPY_ASYNC = 41, MEMSET_ASYNC = 51, LAUNCH_KERNEL = 211 }; /* callback ids from cupti_runtime_cbid.h */

#endif
