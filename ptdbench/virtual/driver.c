/* The driver: what torch and Triton ask of libcuda.so.1, and NVML. */
#include "virtual.h"
extern R cudaDeviceGetAttribute(int *, int, int); extern R cudaMemcpyAsync(void *, const void *, size_t, int, void *);
extern R vg_account(size_t); extern void vg_unaccount(int, size_t); extern char *vg_addresses(size_t); extern void vg_forget(void *, size_t);
API R cuInit(unsigned f) { return vg_ready(); }
API R cuDriverGetVersion(int *v) { *v = 13000; return 0; }
API R cuDeviceGet(int *d, int o) { *d = o; return 0; }
API R cuDeviceGetCount(int *n) { *n = vg_count(); return 0; }
API R cuDevicePrimaryCtxGetState(int d, unsigned *f, int *a) { *f = 0; *a = 1; return 0; }
static long contexts[64];
API R cuDevicePrimaryCtxRetain(void **c, int d) { *c = &contexts[d]; return 0; }
API R cuCtxGetCurrent(void **c) { *c = &contexts[vg_current()]; return 0; }
API R cuCtxSetCurrent(void *c) { return 0; }
API R cuCtxGetDevice(int *d) { *d = vg_current(); return 0; }
API R cuDeviceGetAttribute(int *v, int a, int d) { return cudaDeviceGetAttribute(v, a, d); }
API R cuGetErrorString(R e, const char **s) { *s = e == 2 ? "out of memory" : "virtual driver error"; return 0; }
API R cuGetErrorName(R e, const char **s) { *s = "CUDA_ERROR_VIRTUAL"; return 0; }
API R cuPointerGetAttribute(void *d, int a, void *p) { if (a == 3) *(void **)d = p; else if (a == 1) *(int *)d = 0; else *(int *)d = vg_current(); return 0; }
API R cuMemGetAddressRange_v2(void **base, size_t *n, void *p) { if (base) *base = p; if (n) *n = 1 << 21; return 0; }
/* modules: only names matter */
API R cuModuleLoadData(void **m, const void *i) { *m = (void *)1; return vg_ready(); }
API R cuModuleLoadDataEx(void **m, const void *i) { *m = (void *)1; return vg_ready(); }
API R cuModuleLoad(void **m, const char *i) { *m = (void *)1; return vg_ready(); }
API R cuModuleGetFunction(void **f, void *m, const char *n) { *f = strdup(n); return 0; }
API R cuLibraryLoadData(void **l) { *l = (void *)1; return 0; }
API R cuLibraryGetKernel(void **k, void *l, const char *n) { *k = strdup(n); return 0; }
API R cuFuncGetAttribute(int *v, int a, void *f) { *v = a == 0 ? 1024 : a == 4 ? 64 : 0; return 0; }
API R cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n) { *n = 2; return 0; }
API R cuOccupancyMaxActiveClusters(int *n) { *n = 66; return 0; }
extern double vg_guess(const char *, void **, const unsigned *, const unsigned *, size_t *);
API R cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned sh, void *s, void **a, void **x) {
    unsigned g[3] = {gx, gy, gz}, b[3] = {bx, by, bz}; size_t bytes = (size_t)gx * gy * gz * bx * 64; if (vg_ready()) return vg_ready();
    vg_work(KERNEL, f, s, 2 + bytes / 2.4e6, bytes, g, b); return 0;
}
struct launch { unsigned gx, gy, gz, bx, by, bz, sh; void *s; };
API R cuLaunchKernelEx(struct launch *c, void *f, void **a, void **x) { return cuLaunchKernel(f, c->gx, c->gy, c->gz, c->bx, c->by, c->bz, c->sh, c->s, a, x); }
/* expandable segments */
struct piece { size_t n; int device; };
API R cuMemGetAllocationGranularity(size_t *n, void *p, int o) { *n = 2 << 20; return 0; }
API R cuMemAddressReserve(void **p, size_t n, size_t align, void *hint, unsigned long long f) { if (vg_ready()) return vg_ready(); *p = vg_addresses(n); return *p ? 0 : 2; }
API R cuMemAddressFree(void *p, size_t n) { return 0; }
API R cuMemCreate(struct piece **h, size_t n, void *p, unsigned long long f) { R r = vg_account(n); vg_log("create %zu %s\n", n, r ? "FAILED" : "ok"); if (r) return r; *h = malloc(sizeof **h); **h = (struct piece){n, vg_current()}; return 0; }
API R cuMemRelease(struct piece *h) { vg_unaccount(h->device, h->n); vg_log("release %zu\n", h->n); free(h); return 0; }
API R cuMemUnmap(void *p, size_t n) { vg_forget(p, n); return 0; }
API R cuMemExportToShareableHandle(void) { return 801; }
API R cuCtxGetLimit(size_t *v, int l) { *v = 1024; return 0; }
API R cuStreamIsCapturing(void *s, int *v) { *v = 0; return 0; }
/* NVML */
static int place(void *h) { return (int)(intptr_t)h - 1; }
API R nvmlInit_v2(void) { return 0; }
API R nvmlInitWithFlags(unsigned f) { return 0; }
API R nvmlShutdown(void) { return 0; }
API const char *nvmlErrorString(R r) { return r == 3 ? "Not Supported" : "virtual NVML"; }
static int all(void) { const char *e = getenv("PTDBENCH_VIRTUAL_COUNT"); return e ? atoi(e) : 1; }
API R nvmlDeviceGetCount_v2(unsigned *n) { *n = all(); return 0; }
API R nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = (void *)(intptr_t)(i + 1); return i < (unsigned)all() ? 0 : 2; }
API R nvmlDeviceGetHandleByPciBusId_v2(const char *s, void **h) { unsigned d, b; if (sscanf(s, "%x:%x", &d, &b) != 2) return 2; *h = (void *)(intptr_t)b; return 0; }
static void uuid(char *s, int i) { sprintf(s, "GPU-11111111-1111-1111-1111-1111111111%02x", i); }
API R nvmlDeviceGetUUID(void *h, char *s, unsigned n) { char t[64]; uuid(t, place(h)); snprintf(s, n, "%s", t); return 0; }
API R nvmlDeviceGetHandleByUUID(const char *s, void **h) { char t[64]; for (int i = 0; i < all(); i++) { uuid(t, i); if (!strcmp(s, t)) { *h = (void *)(intptr_t)(i + 1); return 0; } } return 6; }
API R nvmlDeviceGetName(void *h, char *s, unsigned n) { snprintf(s, n, "%s", vg_device()->name); return 0; }
API R nvmlDeviceGetIndex(void *h, unsigned *i) { *i = place(h); return 0; }
struct pci { char legacy[16]; unsigned domain, bus, device, id, sub; char busid[32]; };
API R nvmlDeviceGetPciInfo_v3(void *h, struct pci *p) { memset(p, 0, sizeof *p); p->bus = place(h) + 1; sprintf(p->busid, "00000000:%02X:00.0", p->bus); sprintf(p->legacy, "0000:%02X:00.0", p->bus); return 0; }
API R nvmlDeviceGetPowerUsage(void *h, unsigned *v) { *v = 350000; return 0; }
API R nvmlDeviceGetEnforcedPowerLimit(void *h, unsigned *v) { *v = 700000; return 0; }
API R nvmlDeviceGetPowerManagementDefaultLimit(void *h, unsigned *v) { *v = 700000; return 0; }
API R nvmlDeviceGetTotalEnergyConsumption(void *h, unsigned long long *v) { *v = vg_now() / 1e6 * 0.35 * 1e0; return 0; }
API R nvmlDeviceGetClockInfo(void *h, int t, unsigned *v) { *v = t == 2 ? 2619 : 1755; return 0; }
API R nvmlDeviceGetMaxClockInfo(void *h, int t, unsigned *v) { *v = t == 2 ? 2619 : 1980; return 0; }
API R nvmlDeviceGetTemperature(void *h, int t, unsigned *v) { *v = 45; return 0; }
API R nvmlDeviceGetCurrentClocksEventReasons(void *h, unsigned long long *v) { *v = 4; return 0; }
API R nvmlDeviceGetCurrentClocksThrottleReasons(void *h, unsigned long long *v) { *v = 4; return 0; }
API R nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *n, void *p) { *n = 0; return 0; }
API R nvmlDeviceGetComputeRunningProcesses(void *h, unsigned *n, void *p) { *n = 0; return 0; }
API R nvmlDeviceGetCpuAffinity(void *h, unsigned n, unsigned long *v) { memset(v, 0, n * sizeof *v); v[0] = 3; return 0; }
API R nvmlDeviceGetNvLinkState(void *h, unsigned l, int *v) { *v = 1; return l < 18 ? 0 : 2; }
API R nvmlDeviceGetNvLinkRemotePciInfo_v2(void *h, unsigned l, struct pci *p) { memset(p, 0, sizeof *p); sprintf(p->busid, "00000008:00:00.0"); return 0; }
API R nvmlDeviceGetP2PStatus(void *a, void *b, int w, int *v) { *v = 0; return 0; }
API R nvmlDeviceGetTopologyCommonAncestor(void *a, void *b, int *v) { *v = 50; return 0; }
API R nvmlDeviceGetViolationStatus(void *h, int w, unsigned long long *v) { v[0] = vg_now() / 1e3; v[1] = 0; return 0; }
struct meminfo { unsigned long long total, free, used; };
API R nvmlDeviceGetMemoryInfo(void *h, struct meminfo *m) { m->total = vg_device()->total; m->used = vg_device()->context; m->free = m->total - m->used; return 0; }
API R nvmlDeviceGetUtilizationRates(void *h, unsigned *v) { v[0] = v[1] = 0; return 0; }
API R nvmlSystemGetDriverVersion(char *s, unsigned n) { snprintf(s, n, "580.65.06"); return 0; }
API R nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = 13000; return 0; }
API R nvmlDeviceGetGpuFabricInfoV(void *h, void *v) { return 0; }
