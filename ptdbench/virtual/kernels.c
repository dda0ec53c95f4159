/* Kernels: those that torch's libraries register when they are loaded, and modules that Triton and NVRTC compile. Only
 * names are kept; a launch is recorded, and computes what computed.c supports.
 */
#include "virtual.h"

#include <dlfcn.h>
#include <pthread.h>

/* ---- names ---- */

struct kernel {
    const void *host;            /* its host stub */
    const char *name;            /* mangled, as NVIDIA's tools name it */
    const struct recipe *recipe; /* created at the first launch, like the family */
    const struct family *family;
    struct kernel *next;
};

#define BUCKETS (1u << 16) /* torch registers some 50,000 kernels */
static struct kernel *kernels[BUCKETS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct kernel **bucket_of(const void *host) { return &kernels[((uintptr_t)host >> 4) % BUCKETS]; }

/* Demangles a name. This uses torch's libstdc++, as the library is also loaded into programs without one. */
const char *demangled(const char *name) {
    static char *(*demangle)(const char *, char *, size_t *, int *);
    if (!demangle) {
        void *library = dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_NOLOAD);
        if (!library) return name;
        *(void **)&demangle = dlsym(library, "__cxa_demangle");
    }
    int status;
    char *text = demangle ? demangle(name, NULL, NULL, &status) : NULL;
    return text ? text : name;
}

static struct kernel *find(const void *host) {
    struct kernel *found = *bucket_of(host);
    while (found && found->host != host) found = found->next;
    if (found && !found->recipe) {
        const char *name = demangled(found->name);
        found->recipe = recognise(name), found->family = family_of(name);
    }
    return found;
}

/* ---- calls that nvcc inserts into a library with kernels (crt/host_runtime.h of CUDA) ---- */

API void **__cudaRegisterFatBinary(void *binary) {
    static void *handle[2];
    return handle;
}

API void __cudaRegisterFatBinaryEnd(void **handle) {}
API void __cudaUnregisterFatBinary(void **handle) {}
API char __cudaInitModule(void **handle) { return 1; }

API void __cudaRegisterFunction(void **handle, const char *host, char *function, const char *name, int threads,
                                void *thread, void *block, void *block_size, void *grid_size, int *warp_size) {
    struct kernel *new = malloc(sizeof *new);
    pthread_mutex_lock(&lock);
    *new = (struct kernel){host, name, NULL, NULL, *bucket_of(host)};
    *bucket_of(host) = new;
    pthread_mutex_unlock(&lock);
}

/* Device variables: nothing computes with them. */
API void __cudaRegisterVar(void **handle, char *host, char *address, const char *name, int external, size_t bytes,
                           int constant, int global) {}

static __thread struct {
    dim3 grid, block;
    size_t shared;
    struct CUstream_st *stream;
} configured; /* by <<<...>>>, for the call that follows */

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    configured.grid = grid, configured.block = block, configured.shared = shared, configured.stream = stream;
    return 0;
}

API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configured.grid, *block = configured.block, *shared = configured.shared;
    *(struct CUstream_st **)stream = configured.stream;
    return cudaSuccess;
}

API cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host) {
    *kernel = (cudaKernel_t)host;
    return cudaSuccess;
}

/* ---- launches ---- */

/* Checks a launch as far as that does not depend on the kernel's code. */
static bool possible(dim3 grid, dim3 block) {
    return grid.x && grid.y && grid.z && grid.y <= 65535 && grid.z <= 65535 && block.x && block.y && block.z &&
           block.z <= 64 && (size_t)block.x * block.y * block.z <= 1024;
}

/* A kernel of a module has no known arguments, and no `kernel`. */
static cudaError_t start(const char *name, const struct kernel *kernel, dim3 grid, dim3 block, void **arguments,
                         cudaStream_t stream) {
    cudaError_t error = ready();
    if (error) return failed(error);
    if (!possible(grid, block)) return failed(cudaErrorInvalidConfiguration);
    if (arguments && kernel) compute(kernel->recipe, arguments);
    struct detail detail = {0};
    size_t bytes = bytes_of_call(kernel ? kernel->family : NULL, arguments, grid, block, &detail);
    struct work work = {KERNEL, name, bytes, grid, block, .detail = detail};
    describe_grouped(&work);
    enqueue(stream, &work);
    return cudaSuccess;
}

API cudaError_t cudaLaunchKernel(const void *host, dim3 grid, dim3 block, void **arguments, size_t shared,
                                 cudaStream_t stream) {
    struct kernel *kernel = find(host);
    return start(kernel ? kernel->name : "unregistered kernel", kernel, grid, block, arguments, stream);
}

API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                   cudaStream_t stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

API cudaError_t cudaLaunchCooperativeKernel(const void *host, dim3 grid, dim3 block, void **arguments, size_t shared,
                                            cudaStream_t stream) {
    return cudaLaunchKernel(host, grid, block, arguments, shared, stream);
}

API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *host, void **arguments) {
    return cudaLaunchKernel(host, c->gridDim, c->blockDim, arguments, c->dynamicSmemBytes, c->stream);
}

/* A kernel's registers and shared memory are in its code, which is not read: assume an average kernel. It is compiled
 * for the device or for an earlier one of its generation: CUB fails on architectures that torch is not compiled for. */
API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *host) {
    int major = device()->major, minor = device()->minor;
    memset(a, 0, sizeof *a);
    a->binaryVersion = a->ptxVersion = 10 * major + (major >= 10 ? 0 : major == 8 && minor > 6 ? 6 : minor);
    a->maxThreadsPerBlock = 1024;
    a->numRegs = 32;
    a->maxDynamicSharedSizeBytes = device()->shared_memory;
    return cudaSuccess;
}

#define RESIDENT_BLOCKS 2

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *host, int threads,
                                                              size_t shared) {
    *blocks = RESIDENT_BLOCKS;
    return cudaSuccess;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *host, int threads,
                                                                       size_t shared, unsigned flags) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, host, threads, shared);
}

/* ---- modules: a function is only its name, which lives as long as the process, as Triton's modules do ---- */

static CUresult load(void **module) {
    static char only;
    if (ready()) return CUDA_ERROR_NOT_INITIALIZED;
    *module = &only;
    return CUDA_SUCCESS;
}

API CUresult cuModuleLoad(CUmodule *module, const char *path) { return load((void **)module); }
API CUresult cuModuleLoadData(CUmodule *module, const void *image) { return load((void **)module); }

API CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, CUjit_option *options,
                                void **values) {
    return load((void **)module);
}

API CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = (CUfunction)strdup(name);
    return CUDA_SUCCESS;
}

API CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *options, void **values,
                               unsigned count, CUlibraryOption *library_options, void **library_values,
                               unsigned library_count) {
    return load((void **)library);
}

API CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
    *kernel = (CUkernel)strdup(name);
    return CUDA_SUCCESS;
}

API CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function) {
    /* no spills, no static shared memory */
    *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0;
    return CUDA_SUCCESS;
}

API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t shared) {
    *blocks = RESIDENT_BLOCKS;
    return CUDA_SUCCESS;
}

API CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
    *clusters = device()->multiprocessors / 2;
    return CUDA_SUCCESS;
}

API CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **arguments,
                            void **extra) {
    dim3 grid = {grid_x, grid_y, grid_z}, block = {block_x, block_y, block_z};
    return (CUresult)start((const char *)function, NULL, grid, block, NULL, stream);
}

API CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction function, void **arguments, void **extra) {
    return cuLaunchKernel(function, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
                          c->sharedMemBytes, c->hStream, arguments, extra);
}
