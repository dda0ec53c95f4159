/* CUPTI, as far as torch's profiler asks: records of calls, of what they start on the device, and of the operation above. */
#include "virtual.h"
#include <sys/syscall.h>
#include <time.h>
#define CUPTIAPI
#include "cupti_activity.h"
static volatile int on[256]; static uint64_t (*clock_)(void);
static void (*request)(uint8_t **, size_t *, size_t *); static void (*completed)(CUcontext, uint32_t, uint8_t *, size_t, size_t);
struct note { int kind, copy, device; const char *name; int cbid; long stream; uint64_t begin, end, host, host_end, external[8]; size_t bytes; unsigned g[3], b[3]; uint32_t id, thread; };
static uint8_t *buffer; static size_t at, room; static uint32_t ids;   /* torch flushes only what it was asked a buffer for */
static void fill(const struct note *n); static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread uint64_t above[8][256]; static __thread int deep[8];
static uint64_t now(void) { return clock_ ? clock_() : (uint64_t)vg_now(); }
/* torch's clock may count something else than nanoseconds. */
static double rate(uint64_t host) { static uint64_t first; static double first_ns; double ns = vg_now(); if (!first) { first = host; first_ns = ns; usleep(2000); host = now(); ns = vg_now(); } return ns - first_ns > 1e6 ? (host - first) / (ns - first_ns) : 1; }
static void keep(struct note *n) {
    pthread_mutex_lock(&lock); n->id = ++ids; size_t most;
    if (buffer && at + 2048 > room) { completed(0, 0, buffer, room, at); buffer = 0; }
    if (!buffer && request) { at = 0; request(&buffer, &room, &most); }
    if (buffer) fill(n);
    pthread_mutex_unlock(&lock);
}
void vg_profile(int kind, const char *name, const char *api, void *stream, uint64_t begin, uint64_t end, size_t bytes, const unsigned *g, const unsigned *b, int copy) {
    if (!on[CUPTI_ACTIVITY_KIND_RUNTIME] && !on[CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL]) return;
    struct note n = {kind, copy, vg_current(), name, kind == KERNEL ? 211 : kind == COPY ? 41 : kind == SET ? 51 : copy, vg_stream_id(stream)};
    n.host = now(); n.host_end = n.host + 4000 * rate(n.host); double real = vg_now(); n.begin = n.host + (begin - real) * rate(n.host); n.end = n.host + (end - real) * rate(n.host); n.bytes = bytes; n.thread = syscall(SYS_gettid);
    if (g) memcpy(n.g, g, 12); if (b) memcpy(n.b, b, 12);
    if (kind == COPY) n.copy = name[0] == '2' ? 8 : name[0] == 'H' && name[3] == 'D' ? 1 : name[0] == 'D' && name[3] == 'H' ? 2 : name[0] == 'D' ? 8 : 9;
    for (int i = 0; i < 8; i++) n.external[i] = deep[i] ? above[i][deep[i] - 1] : 0;
    keep(&n);
}
void vg_api(int cbid, double began) {
    if (!on[CUPTI_ACTIVITY_KIND_RUNTIME]) return;
    struct note n = {9, 0, vg_current(), "", cbid}; n.host_end = now(); n.host = n.host_end - (vg_now() - began) * rate(n.host_end); n.thread = syscall(SYS_gettid);
    for (int i = 0; i < 8; i++) n.external[i] = deep[i] ? above[i][deep[i] - 1] : 0;
    keep(&n);
}
API CUptiResult cuptiActivityRegisterCallbacks(CUpti_BuffersCallbackRequestFunc r, CUpti_BuffersCallbackCompleteFunc c) { request = r; completed = c; return 0; }
API CUptiResult cuptiActivityRegisterTimestampCallback(CUpti_TimestampCallbackFunc f) { clock_ = f; return 0; }
API CUptiResult cuptiActivityEnable(CUpti_ActivityKind k) { vg_log("cupti enable %d\n", k); on[k & 255] = 1; return 0; }
API CUptiResult cuptiActivityDisable(CUpti_ActivityKind k) { on[k & 255] = 0; return 0; }
API CUptiResult cuptiActivityPushExternalCorrelationId(CUpti_ExternalCorrelationKind k, uint64_t id) { int i = k & 7; if (deep[i] < 256) above[i][deep[i]++] = id; return 0; }
API CUptiResult cuptiActivityPopExternalCorrelationId(CUpti_ExternalCorrelationKind k, uint64_t *last) { int i = k & 7; if (!deep[i]) return 1; deep[i]--; if (last) *last = above[i][deep[i]]; return 0; }
static size_t size(const CUpti_Activity *a) { switch (a->kind) { case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: return sizeof(CUpti_ActivityKernel9); case CUPTI_ACTIVITY_KIND_MEMCPY: return sizeof(CUpti_ActivityMemcpy6); case CUPTI_ACTIVITY_KIND_MEMSET: return sizeof(CUpti_ActivityMemset4); case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION: return sizeof(CUpti_ActivityExternalCorrelation); default: return sizeof(CUpti_ActivityAPI); } }
static void fill(const struct note *n) {
    uint8_t *p = buffer;
    for (int i = 0; i < 8; i++) if (n->external[i] && on[CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION]) { CUpti_ActivityExternalCorrelation *e = (void *)(p + at); memset(e, 0, sizeof *e); e->kind = CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION; e->externalKind = i; e->externalId = n->external[i]; e->correlationId = n->id; at += sizeof *e; }
    CUpti_ActivityAPI *a = (void *)(p + at); memset(a, 0, sizeof *a); a->kind = CUPTI_ACTIVITY_KIND_RUNTIME; a->cbid = n->cbid; a->start = n->host; a->end = n->host_end; a->processId = getpid(); a->threadId = n->thread; a->correlationId = n->id; at += sizeof *a;
    if (n->kind == KERNEL) { CUpti_ActivityKernel9 *k = (void *)(p + at); memset(k, 0, sizeof *k); k->kind = CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL; k->start = n->begin; k->end = k->completed = n->end; k->deviceId = n->device; k->contextId = 1; k->streamId = n->stream; k->gridX = n->g[0]; k->gridY = n->g[1]; k->gridZ = n->g[2]; k->blockX = n->b[0]; k->blockY = n->b[1]; k->blockZ = n->b[2]; k->correlationId = n->id; k->name = n->name; k->registersPerThread = 32; at += sizeof *k; }
    if (n->kind == COPY) { CUpti_ActivityMemcpy6 *k = (void *)(p + at); memset(k, 0, sizeof *k); k->kind = CUPTI_ACTIVITY_KIND_MEMCPY; k->copyKind = n->copy; k->srcKind = k->dstKind = 3; k->start = n->begin; k->end = n->end; k->bytes = n->bytes; k->deviceId = n->device; k->contextId = 1; k->streamId = n->stream; k->correlationId = n->id; at += sizeof *k; }
    if (n->kind == SET) { CUpti_ActivityMemset4 *k = (void *)(p + at); memset(k, 0, sizeof *k); k->kind = CUPTI_ACTIVITY_KIND_MEMSET; k->start = n->begin; k->end = n->end; k->bytes = n->bytes; k->deviceId = n->device; k->contextId = 1; k->streamId = n->stream; k->correlationId = n->id; k->memoryKind = 3; at += sizeof *k; }
}
API CUptiResult cuptiActivityFlushAll(uint32_t flags) {
    pthread_mutex_lock(&lock); if (buffer) { completed(0, 0, buffer, room, at); buffer = 0; } pthread_mutex_unlock(&lock); return 0;
}
API CUptiResult cuptiActivityGetNextRecord(uint8_t *p, size_t valid, CUpti_Activity **r) { uint8_t *next = *r ? (uint8_t *)*r + size(*r) : p; if (next >= p + valid) return CUPTI_ERROR_MAX_LIMIT_REACHED; *r = (CUpti_Activity *)next; return 0; }
API CUptiResult cuptiActivityGetNumDroppedRecords(CUcontext c, uint32_t s, size_t *n) { *n = 0; return 0; }
API CUptiResult cuptiGetVersion(uint32_t *v) { *v = 130000; return 0; }
API CUptiResult cuptiGetResultString(CUptiResult r, const char **s) { *s = "virtual CUPTI"; return 0; }
API CUptiResult cuptiGetCallbackName(CUpti_CallbackDomain d, uint32_t id, const char **s) { *s = id == 211 ? "cudaLaunchKernel_v7000" : id == 41 ? "cudaMemcpyAsync_v3020" : id == 51 ? "cudaMemsetAsync_v3020" : id == 131 ? "cudaStreamSynchronize_v3020" : id == 165 ? "cudaDeviceSynchronize_v3020" : id == 137 ? "cudaEventSynchronize_v3020" : id == 147 ? "cudaStreamWaitEvent_v3020" : id == 135 ? "cudaEventRecord_v3020" : "cudaOther"; return 0; }
