/* Pinned host memory, and copies: more than COPIED bytes to or from a device arrive as zeros. */
#include "virtual.h"

#include <pthread.h>
#include <sys/mman.h>

#define COPIED MIB

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- pinned host memory ---- */

static struct range *pinned;

static void pin(void *address, size_t bytes, bool ours) {
    struct range *new = malloc(sizeof *new);
    pthread_mutex_lock(&lock);
    *new = (struct range){address, bytes, .next = pinned, .ours = ours};
    pinned = new;
    pthread_mutex_unlock(&lock);
}

static struct range *unpin(const void *address) {
    pthread_mutex_lock(&lock);
    struct range *found = take_out(&pinned, address);
    pthread_mutex_unlock(&lock);
    return found;
}

/* Whether an address is pinned, and whether it was allocated here. */
static bool is_pinned(const void *address, bool *ours) {
    pthread_mutex_lock(&lock);
    const struct range *at = range_of(pinned, address);
    *ours = at && at->ours;
    pthread_mutex_unlock(&lock);
    return at;
}

API cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned flags) {
    cudaError_t error = ready();
    if (error) return error;
    bytes = round_up(bytes ? bytes : 1, HOST_PAGE);
    *address = map(NULL, bytes);
    if (!*address) return cudaErrorMemoryAllocation;
    pin(*address, bytes, true);
    return cudaSuccess;
}

API cudaError_t cudaMallocHost(void **address, size_t bytes) { return cudaHostAlloc(address, bytes, 0); }

API cudaError_t cudaFreeHost(void *address) {
    if (!address) return cudaSuccess;
    struct range *found = unpin(address);
    if (!found) return cudaErrorInvalidValue;
    munmap(found->start, found->bytes);
    free(found);
    return cudaSuccess;
}

API cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags) {
    bool ours;
    cudaError_t error = ready();
    if (error) return error;
    if (is_pinned(address, &ours)) return cudaErrorHostMemoryAlreadyRegistered;
    pin(address, bytes, false);
    return cudaSuccess;
}

API cudaError_t cudaHostUnregister(void *address) {
    struct range *found = unpin(address);
    if (!found) return cudaErrorHostMemoryNotRegistered;
    free(found);
    return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *address) {
    int on = device_of(address);
    bool ours, host = on < 0 && is_pinned(address, &ours);
    memset(a, 0, sizeof *a);
    a->type = on >= 0 ? cudaMemoryTypeDevice : host ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    a->device = on >= 0 ? on : host ? current_device() : cudaInvalidDeviceId;
    a->devicePointer = on >= 0 || host ? (void *)address : NULL;
    a->hostPointer = on < 0 ? (void *)address : NULL;
    return cudaSuccess;
}

API CUresult cuPointerGetAttribute(void *value, CUpointer_attribute which, CUdeviceptr address) {
    int on = device_of((void *)address);
    bool ours;
    if (on < 0 && !is_pinned((void *)address, &ours)) return CUDA_ERROR_INVALID_VALUE;
    switch (which) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)value = address; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = on < 0 ? current_device() : on; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(CUmemorytype *)value = on < 0 ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        return CUDA_SUCCESS;
    default: return unanswered("cuPointerGetAttribute of this attribute", CUDA_ERROR_NOT_SUPPORTED);
    }
}

/* ---- copies ---- */

static void move(void *to, const void *from, size_t bytes) {
    bool on = device_of(to) >= 0, ours;
    if (!on && device_of(from) < 0) {
        memmove(to, from, bytes);
    } else if (bytes <= COPIED) {
        if (!on || writable(to, bytes))
            memmove(to, from, bytes);
        else
            zero(to, bytes);
    } else if (on) {
        zero(to, bytes);
    } else if (is_pinned(to, &ours) && ours) {
        forget(to, bytes);
    } else {
        memset(to, 0, bytes);
    }
}

API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                                cudaStream_t stream) {
    /* the kind follows from the addresses */
    cudaError_t error = ready();
    bool to_device = device_of(to) >= 0, from_device = device_of(from) >= 0, ours;
    if (error) return error;
    if ((to_device && !readable(to, bytes)) || (from_device && !readable(from, bytes))) return cudaErrorInvalidValue;
    bool pageable = to_device != from_device && !is_pinned(to_device ? from : to, &ours);
    const char *name = from_device && to_device ? "DtoD" : to_device ? "HtoD" : from_device ? "DtoH" : "HtoH";
    move(to, from, bytes);
    know(to, bytes, known(from, bytes));
    if (to_device != from_device) count_copy(to_device, bytes);
    enqueue(stream, &(struct work){COPY, name, bytes, {1, 1, 1}, {1, 1, 1}});
    return pageable ? cudaStreamSynchronize(stream) : cudaSuccess; /* see CUDA's "API synchronization behavior" */
}

API cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, NULL);
    return error ? error : cudaStreamSynchronize(NULL);
}

API cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes,
                                    cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}

API cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                  size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    cudaError_t error = ready();
    if (error) return error;
    for (size_t row = 0; row < height; row++)
        move((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width),
            know((char *)to + row * to_pitch, width, known((const char *)from + row * from_pitch, width));
    enqueue(stream, &(struct work){COPY, "DtoD", width * height, {1, 1, 1}, {1, 1, 1}});
    return cudaSuccess;
}

API cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    cudaError_t error = ready();
    if (error) return error;
    if (!readable(to, bytes)) return cudaErrorInvalidValue;
    if (value && bytes <= COPIED && writable(to, bytes))
        memset(to, value, bytes);
    else
        zero(to, bytes);
    know(to, bytes, true);
    enqueue(stream, &(struct work){SET, "memset", bytes, {1, 1, 1}, {1, 1, 1}});
    return cudaSuccess;
}

API cudaError_t cudaMemset(void *to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, NULL); }
