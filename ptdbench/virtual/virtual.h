/* What the files of the virtual GPU share.
 *
 * Types and signatures are those of NVIDIA's headers, so a call that changes in a new CUDA is an error of the compiler.
 * Names that are declared here are hidden in the library; API exports what torch, Triton and NVIDIA's own libraries
 * call.
 */
#ifndef PTDBENCH_VIRTUAL_H
#define PTDBENCH_VIRTUAL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
/* Signatures are NVIDIA's, and most calls need few of their arguments. */
#pragma GCC diagnostic ignored "-Wunused-parameter"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Half precision types of C++, with headers that the wheels lack; only their sizes matter to anything below. */
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

/* device.c: the model of GPU, which of them the process sees, and who may use them. */
enum dtype_peak { FP64, FP32, TF32, BF16, FP16, FP8, PEAKS };
struct device {
    char name[128];
    size_t memory, allocatable, context, l2, shared_memory; /* bytes, as all sizes */
    int major, minor, multiprocessors, bus_width;
    double bandwidth, link;     /* bytes/s */
    double clock, memory_clock; /* Hz */
    double power;               /* W */
    double peaks[PEAKS];        /* FLOP/s */
};
const struct device *device(void);
int machine_count(void);   /* devices of the machine */
int visible_count(void);   /* those that CUDA_VISIBLE_DEVICES leaves */
int physical(int visible); /* a visible device's place in the machine */
int current_device(void);
cudaError_t ready(void);               /* whether this process may use CUDA; called by all that needs a device */
cudaError_t failed(cudaError_t error); /* the error, kept for cudaGetLastError */
bool alone(void);                      /* one rank of many: messages go nowhere */
bool real_time(void);                  /* the device takes its time */
bool computes(const char *kind);       /* whether kernels of a kind are computed, see selftest.py */
int unanswered(const char *name, int status); /* says once that nothing answers a call; returns its status */

/* memory.c */
int device_of(const void *address);               /* -1: not on a device */
bool readable(const void *address, size_t bytes); /* all of it is on a device */
bool writable(void *address, size_t bytes);       /* and may take memory of the host */
void zero(void *address, size_t bytes);           /* of a device; gives back what the host backs */
void forget(char *address, size_t bytes);         /* the same of any memory that map made */
void *map(void *where, size_t bytes);             /* memory of the host that costs nothing until it is written */

/* streams.c */
enum work_kind { KERNEL, COPY, SET };
struct work {
    enum work_kind kind;
    const char *name;   /* lives as long as the process */
    double nanoseconds; /* how long the device takes */
    size_t bytes;
    dim3 grid, block;
};
void enqueue(cudaStream_t stream, const struct work *work);
unsigned stream_id(cudaStream_t stream);
double stream_end(cudaStream_t stream); /* when what is on it ends, in nanoseconds of now() */
void start_not_before(cudaStream_t stream, double time);
double now(void);                 /* nanoseconds since 1970, as torch's profiler counts */
double memory_time(size_t bytes); /* nanoseconds that reading or writing takes */

/* computed.c */
struct recipe; /* what a kernel's name says of it */
const struct recipe *recognise(const char *readable_name);
void compute(const struct recipe *recipe, void **arguments);
size_t traffic(const struct recipe *recipe, void **arguments, dim3 grid,
               dim3 block); /* bytes that it reads and writes */

/* numbers.c: one number of an array, by NCCL's numbers of types. */
double get_number(const void *array, size_t at, int type);
void put_number(void *array, size_t at, int type, double value);
size_t size_of(int type);

/* cupti.c: what torch's profiler is told. */
void record_work(const struct work *work, cudaStream_t stream, double begin, double end);
void record_call(int callback_id, double began);
enum { /* calls by their numbers in cupti_runtime_cbid.h */
    MEMCPY_ASYNC = 41,
    MEMSET_ASYNC = 51,
    STREAM_SYNCHRONIZE = 131,
    EVENT_SYNCHRONIZE = 137,
    DEVICE_SYNCHRONIZE = 165,
    LAUNCH_KERNEL = 211
};

#endif
