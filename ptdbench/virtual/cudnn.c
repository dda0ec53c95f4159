/* cuDNN: convolutions and attention through its graph API, batch norms through its legacy API. One engine for
 * everything, without workspace. The version is that of the real library, which is loaded as well.
 */
#include "virtual.h"

#include <cudnn.h>
#include <nccl.h>

struct cudnnContext {
    cudaStream_t stream;
};

API cudnnStatus_t cudnnCreate(cudnnHandle_t *handle) {
    if (ready()) return CUDNN_STATUS_NOT_INITIALIZED;
    *handle = calloc(1, sizeof **handle);
    return CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) { return free(handle), CUDNN_STATUS_SUCCESS; }

API cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
    return handle->stream = stream, CUDNN_STATUS_SUCCESS;
}
API cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t *stream) {
    return *stream = handle->stream, CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnGetProperty(libraryPropertyType which, int *value) {
    *value = which == MAJOR_VERSION ? CUDNN_MAJOR : which == MINOR_VERSION ? CUDNN_MINOR : CUDNN_PATCHLEVEL;
    return CUDNN_STATUS_SUCCESS;
}

static cudnnStatus_t run(cudnnHandle_t handle, const char *name, size_t bytes, struct detail detail) {
    if (!bytes) detail.flags |= GUESSED;
    dim3 grid = {device()->multiprocessors, 1, 1}, block = {384, 1, 1};
    enqueue(handle->stream, &(struct work){KERNEL, name, bytes, grid, block, .detail = detail});
    return CUDNN_STATUS_SUCCESS;
}

/* The legacy API describes tensors by objects that are not kept here. */
static cudnnStatus_t run_legacy(cudnnHandle_t handle, const char *name) {
    return run(handle, name, 0, (struct detail){});
}

/* ---- descriptors: never read, so all are the same object ---- */

static char only;

#define DESCRIPTOR(create, type)           \
    API cudnnStatus_t create(type *made) { \
        *made = (type) & only;             \
        return CUDNN_STATUS_SUCCESS;       \
    }
DESCRIPTOR(cudnnCreateTensorDescriptor, cudnnTensorDescriptor_t)
DESCRIPTOR(cudnnCreateFilterDescriptor, cudnnFilterDescriptor_t)
DESCRIPTOR(cudnnCreateConvolutionDescriptor, cudnnConvolutionDescriptor_t)
DESCRIPTOR(cudnnCreateActivationDescriptor, cudnnActivationDescriptor_t)
DESCRIPTOR(cudnnCreateDropoutDescriptor, cudnnDropoutDescriptor_t)

/* ---- batch norms: the calls of cudnn_ops.h, of whose arguments few are used ---- */

#define NONE(bytes) (*(bytes) = 0, CUDNN_STATUS_SUCCESS)
typedef const cudnnTensorDescriptor_t tensor;

API cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(cudnnHandle_t h, cudnnBatchNormMode_t mode,
                                                                           cudnnBatchNormOps_t ops, tensor x, tensor z,
                                                                           tensor y, tensor scale,
                                                                           const cudnnActivationDescriptor_t activation,
                                                                           size_t *bytes) {
    return NONE(bytes);
}

API cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(cudnnHandle_t h, cudnnBatchNormMode_t mode,
                                                                    cudnnBatchNormOps_t ops, tensor x, tensor y,
                                                                    tensor dy, tensor dz, tensor dx, tensor scale,
                                                                    const cudnnActivationDescriptor_t activation,
                                                                    size_t *bytes) {
    return NONE(bytes);
}

API cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(cudnnHandle_t h, cudnnBatchNormMode_t mode,
                                                                       cudnnBatchNormOps_t ops,
                                                                       const cudnnActivationDescriptor_t activation,
                                                                       tensor x, size_t *bytes) {
    return NONE(bytes);
}

API cudnnStatus_t cudnnBatchNormalizationForwardTrainingEx(
    cudnnHandle_t h, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t ops, const void *alpha, const void *beta, tensor x,
    const void *x_data, tensor z, const void *z_data, tensor y, void *y_data, tensor scale, const void *scale_data,
    const void *bias_data, double factor, void *mean, void *variance, double epsilon, void *saved_mean,
    void *saved_variance, cudnnActivationDescriptor_t activation, void *workspace, size_t workspace_bytes,
    void *reserve, size_t reserve_bytes) {
    return run_legacy(h, "virtual_cudnn_batch_norm_forward");
}

API cudnnStatus_t cudnnBatchNormalizationBackwardEx(
    cudnnHandle_t h, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t ops, const void *alpha, const void *beta,
    const void *alpha_parameters, const void *beta_parameters, tensor x, const void *x_data, tensor y,
    const void *y_data, tensor dy, const void *dy_data, tensor dz, void *dz_data, tensor dx, void *dx_data,
    tensor scale, const void *scale_data, const void *bias_data, void *dscale_data, void *dbias_data, double epsilon,
    const void *saved_mean, const void *saved_variance, cudnnActivationDescriptor_t activation, void *workspace,
    size_t workspace_bytes, void *reserve, size_t reserve_bytes) {
    return run_legacy(h, "virtual_cudnn_batch_norm_backward");
}

API cudnnStatus_t cudnnBatchNormalizationForwardInference(cudnnHandle_t h, cudnnBatchNormMode_t mode, const void *alpha,
                                                          const void *beta, tensor x, const void *x_data, tensor y,
                                                          void *y_data, tensor scale, const void *scale_data,
                                                          const void *bias_data, const void *mean, const void *variance,
                                                          double epsilon) {
    return run_legacy(h, "virtual_cudnn_batch_norm_inference");
}

/* ---- graphs (cudnn_graph.h): descriptors contain descriptors, up to an executable plan ---- */

/* Each keeps what its parts compute, up to the plan that is executed. torch builds graphs of convolutions and attention;
 * an attention is one operation, or a graph of two products forward and five backward. */
enum { MOST_DIMS = 5 };
struct part {
    cudnnBackendDescriptorType_t type;
    int dtype, dimensions; /* of a tensor; NCCL's number of the type */
    int64_t dims[MOST_DIMS];
    const char *kernel; /* of all others, as is the rest */
    struct detail detail;
    size_t bytes;
};

static const char *kernel_of(cudnnBackendDescriptorType_t type) {
    switch (type) {
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR: return "virtual_cudnn_convolution_forward";
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR: return "virtual_cudnn_convolution_dgrad";
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR: return "virtual_cudnn_convolution_wgrad";
    default: return NULL;
    }
}

API cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *made) {
    struct part *new = malloc(sizeof *new);
    *new = (struct part){.type = type, .kernel = kernel_of(type)};
    *made = new;
    return CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t made) {
    return free(made), CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t made) { return CUDNN_STATUS_SUCCESS; }

static int type_of(cudnnDataType_t type) {
    return type == CUDNN_DATA_FLOAT ? ncclFloat32 : type == CUDNN_DATA_HALF ? ncclFloat16 : ncclBfloat16;
}

static size_t tensor_bytes(const struct part *tensor) {
    size_t bytes = size_of(tensor->dtype);
    for (int d = 0; d < tensor->dimensions; d++) bytes *= tensor->dims[d];
    return bytes;
}

static void take_queries(struct part *to, const struct part *tensor, int products) {
    for (int d = 0; d < 4; d++) to->detail.dims[BATCH + d] = tensor->dims[d];
    to->detail.dims[VALUE_WIDTH] = tensor->dims[3];
    to->detail.dtype = to->detail.result = NUMBER_OF(tensor->dtype);
    to->detail.dims[PRODUCTS] = products;
}

static void take_keys(struct part *to, int64_t heads, int64_t keys) {
    to->detail.dims[KEY_HEADS] = heads, to->detail.dims[KEYS] = keys;
}

/* Takes from a tensor what the log says of an operation, by its role. */
static void take_tensor(struct part *to, const struct part *tensor, int role) {
    enum { FORWARD_Q = 2800, FORWARD_K, FORWARD_V, BACKWARD_Q = 2851, BACKWARD_K, BACKWARD_V }; /* since cuDNN 9.13 */
    int of_input = -1;
    switch (role) {
    case FORWARD_Q: take_queries(to, tensor, 2); break;
    case BACKWARD_Q: take_queries(to, tensor, 5); break;
    case FORWARD_K:
    case BACKWARD_K: take_keys(to, tensor->dims[1], tensor->dims[2]); break;
    case FORWARD_V:
    case BACKWARD_V: to->detail.dims[VALUE_WIDTH] = tensor->dims[3]; break;
    case CUDNN_ATTR_OPERATION_MATMUL_ADESC: take_queries(to, tensor, 1); break;
    case CUDNN_ATTR_OPERATION_MATMUL_BDESC: take_keys(to, tensor->dims[1], tensor->dims[3]); break;
    case CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X: of_input = 0; break;
    case CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W:
    case CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW: of_input = 4; break;
    }
    if (to->kernel) to->bytes += tensor_bytes(tensor), to->detail.dtype = to->detail.result = NUMBER_OF(tensor->dtype);
    for (int d = 0; of_input >= 0 && d < 4; d++) to->detail.dims[of_input + d] = tensor->dims[d];
    if (of_input >= 0 && tensor->dimensions > 4) to->detail.dims[of_input + 3] *= tensor->dims[4];
}

/* Takes what a part computes; in a graph of products, the first is that of queries and keys. */
static void take_part(struct part *to, const struct part *part) {
    int *products = &to->detail.dims[PRODUCTS], before = *products;
    uint8_t flags = to->detail.flags | part->detail.flags;
    if (part->kernel) {
        to->kernel = part->kernel, to->detail = part->detail, to->bytes = part->bytes;
    } else if (part->detail.dims[PRODUCTS]) {
        if (!before || part->type != CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR) to->detail = part->detail;
        if (part->type == CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR) *products = before + 1;
    }
    to->detail.flags = flags;
}

API cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t of, cudnnBackendAttributeName_t which,
                                           cudnnBackendAttributeType_t type, int64_t count, const void *values) {
    enum { BAND_MASK = 44 }; /* since cuDNN 9.13 */
    struct part *whole = of, *const *parts = values;
    for (int64_t i = 0; type == CUDNN_TYPE_BACKEND_DESCRIPTOR && i < count; i++) {
        if (!parts[i]) continue;
        if (parts[i]->type == CUDNN_BACKEND_TENSOR_DESCRIPTOR)
            take_tensor(whole, parts[i], which);
        else
            take_part(whole, parts[i]);
        if ((int)parts[i]->type == BAND_MASK) whole->detail.flags |= CAUSAL;
    }
    if (type == CUDNN_TYPE_POINTWISE_MODE && *(const int *)values == CUDNN_POINTWISE_GEN_INDEX)
        whole->detail.flags |= CAUSAL;
    if (which == CUDNN_ATTR_TENSOR_DATA_TYPE) whole->dtype = type_of(*(const cudnnDataType_t *)values);
    if (which == CUDNN_ATTR_TENSOR_DIMENSIONS && count <= MOST_DIMS)
        memcpy(whole->dims, values, count * sizeof *whole->dims), whole->dimensions = count;
    return CUDNN_STATUS_SUCCESS;
}

/* Queries for engines return one, in the descriptor that the caller provides; numbers are 0, including the workspace
 * size; lists of notes, knobs and choices are empty. */
API cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const of, cudnnBackendAttributeName_t which,
                                           cudnnBackendAttributeType_t type, int64_t room, int64_t *count,
                                           void *values) {
    bool engine = type == CUDNN_TYPE_BACKEND_DESCRIPTOR &&
                  (which == CUDNN_ATTR_ENGINEHEUR_RESULTS || which == CUDNN_ATTR_ENGINECFG_ENGINE ||
                   which == CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
    bool number = type == CUDNN_TYPE_INT64 || type == CUDNN_TYPE_INT32;
    if (count) *count = number || engine;
    if (room < 1 || !values) return CUDNN_STATUS_SUCCESS;
    if (engine) take_part(*(struct part **)values, of);
    if (number) memset(values, 0, type == CUDNN_TYPE_INT64 ? sizeof(int64_t) : sizeof(int32_t));
    return CUDNN_STATUS_SUCCESS;
}

/* Reads queries, keys and values, and writes the result and its statistics; backward also the result and its gradient. */
size_t attention_bytes(const struct detail *d) {
    const int *n = d->dims;
    size_t queries = (size_t)n[BATCH] * n[HEADS] * n[QUERIES], keys = (size_t)n[BATCH] * n[KEY_HEADS] * n[KEYS];
    size_t size = size_of(d->dtype - NUMBER_OF(0)), once = (queries + keys) * (n[WIDTH] + n[VALUE_WIDTH]) * size;
    return n[PRODUCTS] ? once * (n[PRODUCTS] > 2 ? 2 : 1) + queries * sizeof(float) : 0;
}

API cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan,
                                      cudnnBackendDescriptor_t pack) {
    const struct part *p = plan;
    return run(handle, p->kernel ? p->kernel : "virtual_cudnn_attention", p->kernel ? p->bytes : attention_bytes(&p->detail), p->detail);
}
