/* What the parts of the virtual GPU share. */
#ifndef VGPU_H
#define VGPU_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdint.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <pthread.h>
#include <unistd.h>
#include <dlfcn.h>
#define API __attribute__((visibility("default")))
typedef int R;                                   /* cudaError_t, CUresult, ncclResult_t, cublasStatus_t, ... */
struct device { const char *name; size_t total, context; int major, minor, sms, smem_optin, smem_sm, l2, bus; };
extern const struct device *vg_device(void);     /* chosen by $VGPU */
extern int vg_count(void);                       /* $PTDBENCH_VIRTUAL_COUNT */
extern R vg_ready(void);                         /* 0, or "initialization error" in a fork of a process that used CUDA */
extern R vg_add(void **out, size_t n);           /* device memory */
extern int unanswered(const char *name, int status);
extern void vg_log(const char *format, ...);
extern int vg_logging;
extern double vg_now(void);                      /* ns, for records */
extern long vg_stream_id(void *stream);
enum { KERNEL, COPY, SET };
/* Notes one thing done by the device: for the log, the clock of its stream and the profiler. */
extern void vg_work(int kind, const char *name, void *stream, double microseconds, size_t bytes, const unsigned *grid, const unsigned *block);
extern void vg_profile(int kind, const char *name, const char *api, void *stream, uint64_t begin, uint64_t end, size_t bytes, const unsigned *grid, const unsigned *block, int copy_kind);
extern int vg_current(void);
extern void vg_api(int cbid, double began);       /* a call that starts nothing, for the profiler */
#endif
