/* The driver calls of torch, Triton and NVIDIA's libraries besides memory, streams and kernels: contexts, and look-up
 * of functions by name. */
#include "virtual.h"

#include <dlfcn.h>

API CUresult cuInit(unsigned flags) { return (CUresult)usable(); }
API CUresult cuDriverGetVersion(int *version) { return (CUresult)cudaDriverGetVersion(version); }

API CUresult cuDeviceGet(CUdevice *number, int ordinal) {
    if (ordinal < 0 || ordinal >= visible_count()) return CUDA_ERROR_INVALID_DEVICE;
    *number = ordinal;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetCount(int *count) { return *count = visible_count(), CUDA_SUCCESS; }

/* Attributes have the same numbers as in the runtime. */
API CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice number) {
    return (CUresult)cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)which, number);
}

/* Each device has one context, the primary one; a thread's context is that of its current device. */
static char contexts[MOST_DEVICES];

static CUcontext context_of(int number) { return (CUcontext)&contexts[number]; }

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice number) {
    *context = context_of(number);
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice number, unsigned *flags, int *active) {
    *flags = 0;
    *active = has_context(number);
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext *context) { return *context = context_of(current_device()), CUDA_SUCCESS; }

API CUresult cuCtxSetCurrent(CUcontext context) {
    size_t number = (char *)context - contexts;
    return number < MOST_DEVICES ? (CUresult)cudaSetDevice(number) : CUDA_SUCCESS;
}

API CUresult cuCtxGetDevice(CUdevice *number) { return *number = current_device(), CUDA_SUCCESS; }

API CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    *value = KIB; /* CUDA's default stack size of a thread, the limit that torch reads */
    return CUDA_SUCCESS;
}

/* How a kernel is to fetch tiles of a tensor, which no kernel does. */
API CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t dims, void *address,
                                    const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                    const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                    CUtensorMapFloatOOBfill fill) {
    return memset(map, 0, sizeof *map), CUDA_SUCCESS;
}

/* Finds a driver function by name: an implementation, or a stub that reports the call. A name stands for its newest
 * version. */
API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                                 unsigned long long flags,
                                                 enum cudaDriverEntryPointQueryResult *found) {
    char newer[128];
    snprintf(newer, sizeof newer, "%s_v2", name);
    *function = dlsym(RTLD_DEFAULT, newer);
    if (!*function) *function = dlsym(RTLD_DEFAULT, name);
    if (found) *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return *function ? cudaSuccess
                     : (cudaError_t)unanswered("cudaGetDriverEntryPoint for a name that torch did not list",
                                               cudaErrorSymbolNotFound);
}

#undef cudaGetDriverEntryPoint /* a macro in some versions */
API cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                        enum cudaDriverEntryPointQueryResult *found) {
    return cudaGetDriverEntryPointByVersion(name, function, CUDART_VERSION, flags, found);
}

/* NVIDIA's own libraries request function tables that no header describes; the real NVRTC, which compiles torch's
 * kernels for special functions, works without. */
API CUresult cuGetExportTable(const void **table, const CUuuid *id) { return *table = NULL, CUDA_ERROR_NOT_FOUND; }
