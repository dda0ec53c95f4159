/* The CUDA runtime: memory that is reserved and never touched, streams, events, launches. */
#include "virtual.h"
#include <time.h>
#include <sys/mman.h>
#include <stdarg.h>
#include "driver_types.h"

/* ---- devices ---- */
static double figure(const char *key) {
    const char *text = getenv("PTDBENCH_VIRTUAL_DEVICE"); char with[64]; snprintf(with, sizeof with, ";%s=", key);
    if (!text) return 0;
    if (!strncmp(text, with + 1, strlen(with + 1))) return strtod(text + strlen(with) - 1, 0);
    const char *at = strstr(text, with); return at ? strtod(at + strlen(with), 0) : 0;
}
const struct device *vg_device(void) {
    static struct device d; static char name[128];
    if (!d.name) {
        const char *text = getenv("PTDBENCH_VIRTUAL_DEVICE"), *n = text ? strstr(text, ";name=") : 0; snprintf(name, sizeof name, "%s", n ? n + 6 : "virtual GPU");
        d = (struct device){0, figure("memory"), figure("context"), figure("major"), figure("minor"), figure("multiprocessors"), figure("shared_memory"), figure("shared_memory") + 1024, figure("l2"), figure("bus_width")}; d.name = name;
    }
    return &d;
}
API int unanswered(const char *name, int status) { static pthread_mutex_t m = PTHREAD_MUTEX_INITIALIZER; static const char *said[1024]; static int n; int i = 0; pthread_mutex_lock(&m); while (i < n && said[i] != name) i++; if (i == n && n < 1024) { said[n++] = name; fprintf(stderr, "virtual GPU: nothing answers %s\n", name); } pthread_mutex_unlock(&m); return status; }
static int visible[64], visible_count = -1;
int vg_count(void) {
    if (visible_count < 0) {
        const char *e = getenv("PTDBENCH_VIRTUAL_COUNT"), *v = getenv("CUDA_VISIBLE_DEVICES"); int n = e ? atoi(e) : 1, k = 0;
        if (!v) for (; k < n; k++) visible[k] = k;
        else for (const char *p = v; *p && k < 64;) { char *q; long i = strtol(p, &q, 10); if (q == p || i < 0 || i >= n) break; visible[k++] = i; p = *q == ',' ? q + 1 : q; }
        visible_count = k;
    }
    return visible_count;
}
static int physical(int d) { return d < vg_count() ? visible[d] : d; }
static int user_pid;                             /* the process that initialized CUDA: a fork of it cannot use it */
R vg_ready(void) {
    int me = getpid(), was = __sync_val_compare_and_swap(&user_pid, 0, me);
    if (was && was != me) return 3;              /* cudaErrorInitializationError */
    return vg_count() ? 0 : 100;                 /* cudaErrorNoDevice */
}

/* ---- log and clocks ---- */
int vg_logging = -1; static FILE *log_file; static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
double vg_now(void) { struct timespec t; clock_gettime(CLOCK_REALTIME, &t); return t.tv_sec * 1e9 + t.tv_nsec; }
void vg_log(const char *format, ...) {
    static int pid;
    if (vg_logging < 0 || (vg_logging && pid != getpid())) {
        const char *p = getenv("PTDBENCH_VIRTUAL_LOG"); vg_logging = p != NULL; pid = getpid();
        if (p) { char n[512]; snprintf(n, 512, "%s.%d", p, pid); log_file = fopen(n, "w"); }
    }
    if (!vg_logging) return;
    va_list a; va_start(a, format); pthread_mutex_lock(&mu); vfprintf(log_file, format, a); fflush(log_file); pthread_mutex_unlock(&mu); va_end(a);
}
struct stream { long id; int prio, device; double clock; }; struct event { double clock, host; int recorded; long stream; };
static struct stream null_streams[64]; static long ids = 7; static __thread int dev;
int vg_current(void) { return dev; }
static struct stream *st(void *s) { return (uintptr_t)s <= 2 ? &null_streams[dev] : s; }
long vg_stream_id(void *s) { return (uintptr_t)s <= 2 ? 7 : st(s)->id; }
static int host_bound = -1;
/* With $PTDBENCH_VIRTUAL_REAL_TIME the device takes its time: who waits for it waits, and events are not over before. */
static int real(void) { static int r = -1; if (r < 0) r = getenv("PTDBENCH_VIRTUAL_REAL_TIME") != NULL; return r; }
static void until(double clock) { double d; while (real() && (d = clock - vg_now()) > 0) usleep(d > 1e9 ? 1000000 : (unsigned)(d / 1e3) + 1); }
static struct stream *streams[4096]; static int stream_count;
static double last(void) { double c = null_streams[dev].clock; for (int i = 0; i < stream_count; i++) if (streams[i]->device == dev && streams[i]->clock > c) c = streams[i]->clock; return c; }
void vg_work(int kind, const char *name, void *s, double us, size_t bytes, const unsigned *grid, const unsigned *block) {
    struct stream *x = st(s); if (host_bound < 0) host_bound = !getenv("VGPU_NO_HOST");
    double h = host_bound ? vg_now() : 0; if (x->clock < h) x->clock = h;
    double b = x->clock; x->clock += us * 1e3;
    static const char *kinds[] = {"kernel", "copy", "set"};
    vg_log("%s %.400s us %.2f bytes %zu stream %ld grid %u,%u,%u\n", kinds[kind], name, us, bytes, x->id, grid ? grid[0] : 0, grid ? grid[1] : 0, grid ? grid[2] : 0);
    vg_profile(kind, name, kind == KERNEL ? "cudaLaunchKernel" : kind == COPY ? "cudaMemcpyAsync" : "cudaMemsetAsync", s, b, x->clock, bytes, grid, block, 0);
}

/* ---- memory: of each device a stretch of addresses, handed out once ---- */
#define STRETCH ((size_t)8 << 40)               /* expandable segments reserve 9/8 of the memory for each stream and pool */
#define PAGE2M ((size_t)2 << 20)
static char *base; static size_t used[64], next_[64];
struct block { char *p; size_t n, counted; struct block *next; }; static struct block *device_blocks, *host_blocks;
static void reserve(void) { if (!base) { base = mmap((void *)0x200000000000, STRETCH * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0); if (base == MAP_FAILED) { perror("virtual GPU: addresses"); _exit(70); } } }
static int on_device(const void *p) { return base && (char *)p >= base && (char *)p < base + STRETCH * 8 ? (int)(((char *)p - base) / STRETCH) : -1; }
int vg_on_device(const void *p) { return on_device(p); }
static struct block *in(struct block *l, const void *p) { for (; l; l = l->next) if ((char *)p >= l->p && (char *)p < l->p + l->n) return l; return 0; }
R vg_account(size_t n) { const struct device *d = vg_device(); int i = dev; if (used[i] + n > d->total - d->context) return 2; used[i] += n; return 0; }
void vg_unaccount(int i, size_t n) { used[i] -= n; }
char *vg_addresses(size_t n) { reserve(); n = (n + PAGE2M - 1) & ~(PAGE2M - 1); if (next_[dev] + n + PAGE2M > STRETCH) return 0; char *p = base + STRETCH * dev + next_[dev]; next_[dev] += n + PAGE2M; return p; }
void vg_forget(void *p, size_t n) { madvise(p, n, MADV_DONTNEED); }
R vg_add(void **out, size_t n) {
    *out = 0; if (vg_ready()) return vg_ready();
    size_t m = ((n ? n : 1) + PAGE2M - 1) & ~(PAGE2M - 1); R r = 2;
    pthread_mutex_lock(&mu);
    if (!vg_account(m)) { char *p = vg_addresses(m); if (p) { struct block *b = malloc(sizeof *b); *b = (struct block){p, m, m, device_blocks}; device_blocks = b; *out = p; r = 0; } }
    pthread_mutex_unlock(&mu); vg_log("malloc %zu %s used %zu\n", n, r ? "FAILED" : "ok", used[dev]); return r;
}
static R del(void *p) {
    if (!p) return 0; R r = 1; pthread_mutex_lock(&mu);
    for (struct block **q = &device_blocks; *q; q = &(*q)->next) if ((*q)->p == p) { struct block *b = *q; *q = b->next; vg_forget(b->p, b->n); vg_unaccount(on_device(p), b->counted); free(b); r = 0; break; }
    pthread_mutex_unlock(&mu); vg_log("free %p\n", p); return r;
}
static R host_note(void *p, size_t n) { struct block *b = malloc(sizeof *b); pthread_mutex_lock(&mu); *b = (struct block){p, n, 0, host_blocks}; host_blocks = b; pthread_mutex_unlock(&mu); return 0; }
static R host_forget(void *p, int unmap) {
    R r = 1; pthread_mutex_lock(&mu);
    for (struct block **q = &host_blocks; *q; q = &(*q)->next) if ((*q)->p == p) { struct block *b = *q; *q = b->next; if (unmap) munmap(b->p, b->n); free(b); r = 0; break; }
    pthread_mutex_unlock(&mu); return r;
}
API R cudaMalloc(void **p, size_t n) { return vg_add(p, n); }
API R cudaMallocAsync(void **p, size_t n, void *s) { return vg_add(p, n); }
API R cudaMallocManaged(void **p, size_t n, unsigned f) { return vg_add(p, n); }
API R cudaFree(void *p) { return vg_ready() ? vg_ready() : del(p); }
API R cudaFreeAsync(void *p, void *s) { return del(p); }
API R cudaHostAlloc(void **p, size_t n, unsigned f) {
    if (vg_ready()) return vg_ready(); n = ((n ? n : 1) + 4095) & ~(size_t)4095; *p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    vg_log("hostalloc %zu\n", n); return *p == MAP_FAILED ? (*p = 0, 2) : host_note(*p, n);
}
API R cudaMallocHost(void **p, size_t n) { return cudaHostAlloc(p, n, 0); }
API R cudaFreeHost(void *p) { return p ? host_forget(p, 1) : 0; }
API R cudaHostRegister(void *p, size_t n, unsigned f) { if (vg_ready()) return vg_ready(); if (in(host_blocks, p)) return 712; vg_log("register %zu\n", n); return host_note(p, n); }
API R cudaHostUnregister(void *p) { return host_forget(p, 0) ? 713 : 0; }
API R cudaMemGetInfo(size_t *f, size_t *t) { const struct device *d = vg_device(); if (vg_ready()) return vg_ready(); *t = d->total; *f = d->total - d->context - used[dev]; return 0; }
API R cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    memset(a, 0, sizeof *a); int d = on_device(p); pthread_mutex_lock(&mu); int h = d < 0 && in(host_blocks, p); pthread_mutex_unlock(&mu);
    a->type = d >= 0 ? cudaMemoryTypeDevice : h ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered; a->device = d >= 0 ? d : h ? dev : -2;
    a->devicePointer = d >= 0 || h ? (void *)p : 0; a->hostPointer = d >= 0 ? 0 : (void *)p; return 0;
}
#define REAL ((size_t)1 << 20)                   /* larger copies to a device, or on it, move nothing */
static int pinned(const void *p) { pthread_mutex_lock(&mu); int y = in(host_blocks, p) != 0; pthread_mutex_unlock(&mu); return y; }
API R cudaMemcpyAsync(void *d, const void *s, size_t n, int k, void *stream) {
    if (vg_ready()) return vg_ready(); int dd = on_device(d) >= 0, sd = on_device(s) >= 0;
    if (n <= REAL || !dd) memmove(d, s, n);
    const char *name = sd && dd ? "DtoD" : dd ? "HtoD" : sd ? "DtoH" : "HtoH";
    vg_log("memcpy%s %zu%s\n", name, n, sd != dd && !pinned(dd ? s : d) ? " pageable" : "");
    vg_work(COPY, name, stream, 2 + n / (sd && dd ? 1.2e6 : 5e4), n, 0, 0); if (sd != dd && !pinned(dd ? s : d)) until(st(stream)->clock); return 0;
}
API R cudaMemcpy(void *d, const void *s, size_t n, int k) { return cudaMemcpyAsync(d, s, n, k, 0); }
API R cudaMemcpyPeerAsync(void *d, int dd, const void *s, int sd, size_t n, void *stream) { return cudaMemcpyAsync(d, s, n, 3, stream); }
API R cudaMemcpy2DAsync(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h, int k, void *stream) { if (w * h <= REAL || on_device(d) < 0) for (size_t i = 0; i < h; i++) memmove((char *)d + i * dp, (char *)s + i * sp, w); vg_work(COPY, "2D", stream, 2 + w * h / 1.2e6, w * h, 0, 0); return 0; }
API R cudaMemsetAsync(void *d, int v, size_t n, void *s) { if (n <= 65536) memset(d, v, n); else if (!v) { char *a = (char *)(((uintptr_t)d + 4095) & ~4095UL); size_t m = (size_t)((char *)d + n - a) & ~4095UL; memset(d, 0, a - (char *)d); madvise(a, m, MADV_DONTNEED); } vg_work(SET, "memset", s, 2 + n / 2.4e6, n, 0, 0); return 0; }
API R cudaMemset(void *d, int v, size_t n) { return cudaMemsetAsync(d, v, n, 0); }
API R cudaMemcpyToSymbol(const void *sy, const void *s, size_t n, size_t o, int k) { return 0; }
API R cudaGetSymbolAddress(void **p, const void *s) { return vg_add(p, 4096); }

/* ---- device ---- */
API R cudaGetDeviceCount(int *n) { *n = 0; R r = vg_ready(); if (!r) *n = vg_count(); return r; }
API R cudaGetDevice(int *d) { *d = dev; return 0; }
API R cudaSetDevice(int d) { if (vg_ready()) return vg_ready(); if (d < 0 || d >= vg_count()) return 101; dev = d; return 0; }
API R cudaDriverGetVersion(int *v) { *v = 13000; return 0; }
API R cudaRuntimeGetVersion(int *v) { *v = 13000; return 0; }
API R cudaGetDeviceProperties(struct cudaDeviceProp *p, int i) {
    const struct device *d = vg_device(); if (i < 0 || i >= vg_count()) return 101;
    memset(p, 0, sizeof *p); strcpy(p->name, d->name); p->totalGlobalMem = d->total; p->major = d->major; p->minor = d->minor; p->multiProcessorCount = d->sms; p->warpSize = 32;
    p->maxThreadsPerMultiProcessor = 2048; p->maxThreadsPerBlock = 1024; p->sharedMemPerBlock = 49152; p->sharedMemPerBlockOptin = d->smem_optin; p->sharedMemPerMultiprocessor = d->smem_sm;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536; p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64; p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->l2CacheSize = d->l2; p->memoryBusWidth = d->bus; p->maxBlocksPerMultiProcessor = 32; p->unifiedAddressing = 1; p->concurrentKernels = 1; p->asyncEngineCount = 3; p->textureAlignment = 512; p->cooperativeLaunch = 1; p->canMapHostMemory = 1;
    p->pciBusID = 1 + physical(i); memset(p->uuid.bytes, 0x11, 16); p->uuid.bytes[15] = physical(i); return 0;
}
API R cudaDeviceGetAttribute(int *v, int a, int i) {
    const struct device *d = vg_device(); *v = 0;
    switch (a) {
        case 1: case 2: case 3: *v = 1024; break; case 4: *v = 64; break; case 5: *v = 2147483647; break; case 6: case 7: *v = 65535; break; case 8: *v = 49152; break; case 10: *v = 32; break;
        case 12: case 82: *v = 65536; break; case 13: *v = 1980000; break; case 16: *v = d->sms; break; case 31: case 95: case 102: *v = 1; break; case 36: *v = 2619000; break; case 37: *v = d->bus; break;
        case 38: *v = d->l2; break; case 39: *v = 2048; break; case 75: *v = d->major; break; case 76: *v = d->minor; break; case 81: *v = d->smem_sm; break; case 97: *v = d->smem_optin; break; case 106: *v = 32; break;
    }
    return 0;
}
API R cudaDeviceGetPCIBusId(char *s, int n, int d) { snprintf(s, n, "0000:%02x:00.0", physical(d) + 1); return 0; }
API R cudaDeviceGetStreamPriorityRange(int *l, int *g) { if (l) *l = 0; if (g) *g = -5; return 0; }
API R cudaDeviceCanAccessPeer(int *v, int a, int b) { *v = a != b; return 0; }
API R cudaDeviceSynchronize(void) { vg_log("sync device\n"); double h = vg_now(); until(last()); vg_api(165, h); return vg_ready(); }
API R cudaGetLastError(void) { return 0; }
API R cudaPeekAtLastError(void) { return 0; }
static const char *names(R e, int text) { return e == 0 ? (text ? "no error" : "cudaSuccess") : e == 2 ? (text ? "out of memory" : "cudaErrorMemoryAllocation") : e == 3 ? (text ? "initialization error" : "cudaErrorInitializationError") : e == 100 ? (text ? "no CUDA-capable device is detected" : "cudaErrorNoDevice") : e == 101 ? (text ? "invalid device ordinal" : "cudaErrorInvalidDevice") : (text ? "virtual GPU: error" : "cudaErrorUnknown"); }
API const char *cudaGetErrorString(R e) { return names(e, 1); }
API const char *cudaGetErrorName(R e) { return names(e, 0); }

/* ---- streams and events ---- */
API R cudaStreamCreateWithPriority(void **s, unsigned f, int p) { struct stream *x = calloc(1, sizeof *x); x->id = __sync_add_and_fetch(&ids, 1); x->prio = p; x->device = dev; *s = x; int i = __sync_fetch_and_add(&stream_count, 1); if (i < 4096) streams[i] = x; else stream_count = 4096; return vg_ready(); }
API R cudaStreamCreateWithFlags(void **s, unsigned f) { return cudaStreamCreateWithPriority(s, f, 0); }
API R cudaStreamCreate(void **s) { return cudaStreamCreateWithPriority(s, 0, 0); }
API R cudaStreamDestroy(void *s) { return 0; }
API R cudaStreamSynchronize(void *s) { vg_log("sync stream %ld\n", vg_stream_id(s)); double h = vg_now(); until(st(s)->clock); vg_api(131, h); return 0; }
API R cudaStreamQuery(void *s) { return real() && st(s)->clock > vg_now() ? 600 : 0; }
API R cudaStreamGetPriority(void *s, int *p) { *p = st(s)->prio; return 0; }
API R cudaStreamWaitEvent(void *s, void *e, unsigned f) { struct event *x = e; if (st(s)->clock < x->clock) st(s)->clock = x->clock; vg_log("wait stream %ld event %p of stream %ld%s\n", vg_stream_id(s), e, x->stream, x->recorded ? "" : " NEVER RECORDED"); return 0; }
API R cudaStreamIsCapturing(void *s, int *v) { *v = 0; return 0; }
API R cudaStreamGetCaptureInfo(void *s, int *x, unsigned long long *id, void **g, void **d, void **ed, size_t *n) { *x = 0; if (id) *id = 0; if (g) *g = 0; if (n) *n = 0; return 0; }
API R cudaThreadExchangeStreamCaptureMode(int *m) { return 0; }
API R cudaStreamAddCallback(void *s, void (*cb)(void *, R, void *), void *u, unsigned f) { cb(s, 0, u); return 0; }
API R cudaLaunchHostFunc(void *s, void (*f)(void *), void *u) { f(u); return 0; }
API R cudaEventCreateWithFlags(void **e, unsigned f) { *e = calloc(1, sizeof(struct event)); return vg_ready(); }
API R cudaEventCreate(void **e) { return cudaEventCreateWithFlags(e, 0); }
API R cudaEventRecord(void *e, void *s) { struct event *x = e; x->host = vg_now(); x->clock = st(s)->clock > x->host || getenv("VGPU_NO_HOST") ? st(s)->clock : x->host; x->recorded = 1; x->stream = vg_stream_id(s); vg_log("record event %p stream %ld\n", e, x->stream); return 0; }
API R cudaEventRecordWithFlags(void *e, void *s, unsigned f) { return cudaEventRecord(e, s); }
API R cudaEventQuery(void *e) { return real() && ((struct event *)e)->clock > vg_now() ? 600 : 0; }
API R cudaEventSynchronize(void *e) { vg_log("sync event\n"); double h = vg_now(); until(((struct event *)e)->clock); vg_api(137, h); return 0; }
API R cudaEventDestroy(void *e) { free(e); return 0; }
API R cudaEventElapsedTime(float *ms, void *a, void *b) { struct event *x = a, *y = b; if (!x->recorded || !y->recorded) return 400; *ms = (y->clock - x->clock) / 1e6; return 0; }

/* ---- kernels ---- */
struct dim { unsigned x, y, z; }; static __thread struct { struct dim g, b; size_t sh; void *s; } call;
struct kernel { const void *host; const char *name; struct kernel *next; }; static struct kernel *table[65536];
API void **__cudaRegisterFatBinary(void *f) { static void *h[2]; return h; }
API void __cudaRegisterFatBinaryEnd(void **h) {}
API void __cudaUnregisterFatBinary(void **h) {}
API char __cudaInitModule(void **h) { return 1; }
API void __cudaRegisterFunction(void **h, const char *host, char *f, const char *name, int tl, void *a, void *b, void *c, void *d, int *w) { struct kernel *k = malloc(sizeof *k); unsigned i = ((uintptr_t)host >> 4) & 65535; *k = (struct kernel){host, name, table[i]}; table[i] = k; }
API void __cudaRegisterVar(void **h, char *hv, char *da, const char *dn, int e, size_t s, int c, int g) {}
static const char *name_of(const void *f) { for (struct kernel *k = table[((uintptr_t)f >> 4) & 65535]; k; k = k->next) if (k->host == f) return k->name; return "?"; }
API unsigned __cudaPushCallConfiguration(struct dim g, struct dim b, size_t sh, void *s) { call.g = g; call.b = b; call.sh = sh; call.s = s; return 0; }
API R __cudaPopCallConfiguration(struct dim *g, struct dim *b, size_t *sh, void **s) { *g = call.g; *b = call.b; *sh = call.sh; *s = call.s; return 0; }
API R __cudaGetKernel(void **k, const void *f) { *k = (void *)f; return 0; }
extern double vg_guess(const char *name, void **args, const unsigned *g, const unsigned *b, size_t *bytes);
API R cudaLaunchKernel(const void *f, struct dim g, struct dim b, void **a, size_t sh, void *s) {
    if (vg_ready()) return vg_ready(); if (!g.x || !g.y || !g.z || !b.x) return 9;   /* cudaErrorInvalidConfiguration */
    const char *n = name_of(f); size_t bytes = 0; double us = vg_guess(n, a, &g.x, &b.x, &bytes); vg_work(KERNEL, n, s, us, bytes, &g.x, &b.x); return 0;
}
API R __cudaLaunchKernel(void *f, struct dim g, struct dim b, void **a, size_t sh, void *s) { return cudaLaunchKernel(f, g, b, a, sh, s); }
API R cudaLaunchCooperativeKernel(const void *f, struct dim g, struct dim b, void **a, size_t sh, void *s) { return cudaLaunchKernel(f, g, b, a, sh, s); }
struct config { struct dim g, b; size_t sh; void *s; };
API R cudaLaunchKernelExC(const struct config *c, const void *f, void **a) { return cudaLaunchKernel(f, c->g, c->b, a, c->sh, c->s); }
API R cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) { memset(a, 0, sizeof *a); a->binaryVersion = a->ptxVersion = vg_device()->major * 10; a->maxThreadsPerBlock = 1024; a->numRegs = 32; a->maxDynamicSharedSizeBytes = vg_device()->smem_optin; return 0; }
API R cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int b, size_t s) { *n = 2; return 0; }
API R cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s, unsigned fl) { *n = 2; return 0; }
static R zero(void) { return 0; }
API R cudaGetDriverEntryPointByVersion(const char *s, void **f, unsigned v, unsigned long long fl, int *x) {
    char n[128]; *f = dlsym(RTLD_DEFAULT, s); if (!*f) { snprintf(n, 128, "%s_v2", s); *f = dlsym(RTLD_DEFAULT, n); }
    vg_log("driver entry %s%s\n", s, *f ? "" : " (no-op)"); if (!*f) *f = zero; if (x) *x = 0; return 0;
}
API R cudaGetDriverEntryPoint(const char *s, void **f, unsigned long long fl, int *x) { return cudaGetDriverEntryPointByVersion(s, f, 0, fl, x); }
API R cudaIpcGetMemHandle(void *h, void *p) { return 801; }
API R cudaIpcGetEventHandle(void *h, void *p) { return 801; }
API R cudaStreamBeginCapture(void *s, int m) { return 801; }   /* cudaErrorNotSupported */
API R cudaStreamBeginCaptureToGraph(void *s) { return 801; }
#include <execinfo.h>
#include <signal.h>
static void crashed(int n) { void *a[40]; backtrace_symbols_fd(a, backtrace(a, 40), 2); _exit(139); }
__attribute__((constructor)) static void begin(void) { if (getenv("VGPU_TRACE")) signal(SIGSEGV, crashed); }
