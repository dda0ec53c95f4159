/* cuDNN: convolutions and attention through its graph API, batch norms through its legacy API. One engine for
 * everything, without workspace; sizes are not read, so durations are constant (a rough estimate). The version is that
 * of the real library, which is loaded as well.
 */
#include "virtual.h"

#include <cudnn.h>

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

static cudnnStatus_t run(cudnnHandle_t handle, const char *name, double microseconds) {
    enqueue(handle->stream,
            &(struct work){KERNEL, name, microseconds * 1e3, 0, {device()->multiprocessors, 1, 1}, {384, 1, 1}});
    return CUDNN_STATUS_SUCCESS;
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
    return run(h, "virtual_cudnn_batch_norm_forward", 20);
}

API cudnnStatus_t cudnnBatchNormalizationBackwardEx(
    cudnnHandle_t h, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t ops, const void *alpha, const void *beta,
    const void *alpha_parameters, const void *beta_parameters, tensor x, const void *x_data, tensor y,
    const void *y_data, tensor dy, const void *dy_data, tensor dz, void *dz_data, tensor dx, void *dx_data,
    tensor scale, const void *scale_data, const void *bias_data, void *dscale_data, void *dbias_data, double epsilon,
    const void *saved_mean, const void *saved_variance, cudnnActivationDescriptor_t activation, void *workspace,
    size_t workspace_bytes, void *reserve, size_t reserve_bytes) {
    return run(h, "virtual_cudnn_batch_norm_backward", 20);
}

API cudnnStatus_t cudnnBatchNormalizationForwardInference(cudnnHandle_t h, cudnnBatchNormMode_t mode, const void *alpha,
                                                          const void *beta, tensor x, const void *x_data, tensor y,
                                                          void *y_data, tensor scale, const void *scale_data,
                                                          const void *bias_data, const void *mean, const void *variance,
                                                          double epsilon) {
    return run(h, "virtual_cudnn_batch_norm_inference", 20);
}

/* ---- graphs (cudnn_graph.h): descriptors contain descriptors, up to an executable plan ---- */

/* Each keeps what its parts compute, so that a plan's kernel has a name. torch builds graphs of convolutions and
 * attention. */
struct part {
    cudnnBackendDescriptorType_t type;
    const char *kernel;
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
    *new = (struct part){type, kernel_of(type)};
    *made = new;
    return CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t made) {
    return free(made), CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t made) { return CUDNN_STATUS_SUCCESS; }

API cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t of, cudnnBackendAttributeName_t which,
                                           cudnnBackendAttributeType_t type, int64_t count, const void *values) {
    struct part *whole = of, *const *parts = values;
    for (int64_t i = 0; type == CUDNN_TYPE_BACKEND_DESCRIPTOR && i < count; i++)
        if (parts[i] && parts[i]->kernel) whole->kernel = parts[i]->kernel;
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
    if (engine) (*(struct part **)values)->kernel = ((const struct part *)of)->kernel;
    if (number) memset(values, 0, type == CUDNN_TYPE_INT64 ? sizeof(int64_t) : sizeof(int32_t));
    return CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan,
                                      cudnnBackendDescriptor_t pack) {
    const char *kernel = ((const struct part *)plan)->kernel;
    return run(handle, kernel ? kernel : "virtual_cudnn_attention", 50);
}
