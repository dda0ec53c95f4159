/* The GPU model, the devices that a process sees, which process may use them, and reports of unimplemented calls. */
#include "virtual.h"

#include <pthread.h>
#include <unistd.h>

/* ---- settings: set by library.py in the environment ---- */

static const char *setting(const char *key) {
    /* PTDBENCH_VIRTUAL_DEVICE: key=value separated by ';', the name last. */
    static const char *text;
    if (!text && !(text = getenv("PTDBENCH_VIRTUAL_DEVICE"))) text = "name=virtual GPU";
    for (const char *at = text; at; at = strchr(at, ';')) {
        at += *at == ';';
        size_t length = strlen(key);
        if (!strncmp(at, key, length) && at[length] == '=') return at + length + 1;
    }
    return "0";
}

static double figure(const char *key) { return strtod(setting(key), NULL); }

static struct device model;

static void read_model(void) {
    snprintf(model.name, sizeof model.name, "%s", setting("name"));
    model.memory = figure("memory"), model.allocatable = figure("allocatable"), model.context = figure("context");
    model.l2 = figure("l2"), model.shared_memory = figure("shared_memory");
    model.major = figure("major"), model.minor = figure("minor");
    model.multiprocessors = figure("multiprocessors"), model.bus_width = figure("bus_width");
    model.link = figure("link");
    model.clock = figure("clock"), model.memory_clock = figure("memory_clock"), model.power = figure("power");
}

const struct device *device(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, read_model);
    return &model;
}

bool alone(void) {
    static int is = -1;
    const char *value = is < 0 ? getenv("PTDBENCH_VIRTUAL_ALONE") : NULL;
    return is < 0 ? (is = value && *value) : is;
}

bool computes(const char *kind) {
    /* PTDBENCH_VIRTUAL_COMPUTED: kinds separated by commas; only whole words match. */
    const char *list = getenv("PTDBENCH_VIRTUAL_COMPUTED");
    size_t length = strlen(kind);
    for (const char *at = list; at && *at; at = strchr(at, ',')) {
        at += *at == ',';
        if (!strncmp(at, kind, length) && (at[length] == ',' || !at[length])) return true;
    }
    return false;
}

/* ---- visible devices ---- */

static int visible[MOST_DEVICES], visible_devices;

int machine_count(void) {
    const char *text = getenv("PTDBENCH_VIRTUAL_COUNT");
    int count = text ? atoi(text) : 1;
    return count < 0 ? 0 : count > MOST_DEVICES ? MOST_DEVICES : count;
}

/* Reads CUDA_VISIBLE_DEVICES as CUDA does: numbers up to the first invalid one. */
static void read_visible(void) {
    const char *at = getenv("CUDA_VISIBLE_DEVICES");
    int machine = machine_count(), count = 0;
    if (!at)
        while (count < machine) visible[count] = count, count++;
    while (at && *at && count < MOST_DEVICES) {
        char *end;
        long number = strtol(at, &end, 10);
        if (end == at || number < 0 || number >= machine) break;
        visible[count++] = number;
        at = *end == ',' ? end + 1 : end;
    }
    visible_devices = count;
}

int visible_count(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, read_visible);
    return visible_devices;
}

int physical(int number) { return number >= 0 && number < visible_count() ? visible[number] : number; }

static __thread int current;

int current_device(void) { return current; }

/* The process that first used CUDA; its forks cannot use it, as with a real driver. */
static int owner;

/* Devices on which this process has a context: those that a thread has chosen, or used as its first one. */
static char contexts[MOST_DEVICES];

int has_context(int number) { return number >= 0 && number < MOST_DEVICES && contexts[number]; }

cudaError_t usable(void) {
    int me = getpid(), was = __sync_val_compare_and_swap(&owner, 0, me);
    if (was && was != me) return cudaErrorInitializationError;
    return visible_count() ? cudaSuccess : cudaErrorNoDevice;
}

cudaError_t ready(void) {
    cudaError_t error = usable();
    if (!error) contexts[current] = 1;
    return error;
}

API cudaError_t cudaGetDeviceCount(int *count) {
    cudaError_t error = usable();
    *count = error ? 0 : visible_count();
    return error;
}

API cudaError_t cudaGetDevice(int *number) { return *number = current, cudaSuccess; }

API cudaError_t cudaSetDevice(int number) {
    cudaError_t error = usable();
    if (error) return error;
    if (number < 0 || number >= visible_count()) return cudaErrorInvalidDevice;
    current = number;
    return ready();
}

/* ---- device properties ---- */

API cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }

/* CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". */
static int threads_per_multiprocessor(void) {
    const struct device *d = device();
    if (d->major == 7 && d->minor == 5) return 1024;
    if ((d->major == 8 && d->minor > 0) || d->major == 12) return 1536;
    return 2048;
}

/* From 8.0 on, the shared memory of a block is that of its multiprocessor less 1 KiB for the system. */
static int shared_per_multiprocessor(void) { return device()->shared_memory + (device()->major >= 8 ? KIB : 0); }

API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int number) {
    const struct device *d = device();
    if (number < 0 || number >= visible_count()) return cudaErrorInvalidDevice;
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", d->name);
    memset(p->uuid.bytes, 0x11, sizeof p->uuid.bytes);
    p->uuid.bytes[15] = physical(number);
    p->pciBusID = 1 + physical(number);
    p->totalGlobalMem = d->memory;
    p->major = d->major, p->minor = d->minor;
    p->multiProcessorCount = d->multiprocessors;
    p->l2CacheSize = d->l2;
    p->memoryBusWidth = d->bus_width;
    p->sharedMemPerBlock = 48 * KIB;
    p->sharedMemPerBlockOptin = d->shared_memory;
    p->sharedMemPerMultiprocessor = shared_per_multiprocessor();
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = threads_per_multiprocessor();
    p->maxBlocksPerMultiProcessor = 32;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = INT32_MAX, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->textureAlignment = 512;
    p->asyncEngineCount = 3;
    p->concurrentKernels = p->cooperativeLaunch = p->unifiedAddressing = p->canMapHostMemory = 1;
    return cudaSuccess;
}

/* Features that are not listed are absent: 0. */
static int attribute(enum cudaDeviceAttr which) {
    const struct device *d = device();
    switch (which) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return INT32_MAX;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 48 * KIB;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return d->shared_memory;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return shared_per_multiprocessor();
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrClockRate: return d->clock / 1e3;
    case cudaDevAttrMemoryClockRate: return d->memory_clock / 1e3;
    case cudaDevAttrGlobalMemoryBusWidth: return d->bus_width;
    case cudaDevAttrMultiProcessorCount: return d->multiprocessors;
    case cudaDevAttrL2CacheSize: return d->l2;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return threads_per_multiprocessor();
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrComputeCapabilityMajor: return d->major;
    case cudaDevAttrComputeCapabilityMinor: return d->minor;
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrCooperativeLaunch: return 1;
    default: return (int)which == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED; /* expandable segments */
    }
}

API cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int number) {
    *value = attribute(which);
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char *id, int size, int number) {
    snprintf(id, size, "0000:%02x:00.0", physical(number) + 1);
    return cudaSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int *can, int from, int to) { return *can = from != to, cudaSuccess; }

/* ---- errors ---- */

static __thread cudaError_t last;

/* Keeps an error for cudaGetLastError, which torch calls after each launch; other calls only return their errors. */
cudaError_t failed(cudaError_t error) { return last = error; }

API cudaError_t cudaPeekAtLastError(void) { return last; }

API cudaError_t cudaGetLastError(void) {
    cudaError_t error = last;
    last = cudaSuccess;
    return error;
}

static const struct {
    cudaError_t error;
    const char *name, *text;
} errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported by the virtual GPU"},
};
#define ERRORS (sizeof errors / sizeof *errors)

static int place_of(cudaError_t error) {
    for (size_t i = 0; i < ERRORS; i++)
        if (errors[i].error == error) return i;
    return ERRORS - 1;
}

API const char *cudaGetErrorName(cudaError_t error) { return errors[place_of(error)].name; }
API const char *cudaGetErrorString(cudaError_t error) { return errors[place_of(error)].text; }

/* All driver errors returned here have the same numbers as the runtime's. */
API CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = cudaGetErrorString((cudaError_t)error);
    return CUDA_SUCCESS;
}

API CUresult cuGetErrorName(CUresult error, const char **name) {
    *name = cudaGetErrorName((cudaError_t)error);
    return CUDA_SUCCESS;
}

/* ---- unimplemented calls ---- */

int unanswered(const char *name, int status) {
    static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;
    static const char *said[256];
    static size_t count;
    size_t i = 0;
    pthread_mutex_lock(&writing);
    while (i < count && strcmp(said[i], name)) i++;
    if (i == count) {
        fprintf(stderr, "virtual GPU: nothing answers %s\n", name);
        if (count < sizeof said / sizeof *said) said[count++] = name;
    }
    pthread_mutex_unlock(&writing);
    return status;
}
