/* cuBLAS and cuBLASLt: products take a time that depends on their sizes, and do not write their results. Workspaces are
 * the caller's. */
#include "virtual.h"

#include <cublasLt.h>
#include <cublas_v2.h>
#include <pthread.h>

/* ---- the time of a product ---- */

enum { REACHED = 70 }; /* percent of the peak: a rough estimate */

static double rate(enum dtype_peak type) {
    double peak = device()->peaks[type] ? device()->peaks[type] : device()->peaks[FP32];
    return (peak ? peak : 1e13) * REACHED / 100;
}

static enum dtype_peak peak_of(cudaDataType type, bool tf32) {
    switch (type) {
    case CUDA_R_64F: return FP64;
    case CUDA_R_16F: return FP16;
    case CUDA_R_16BF: return BF16;
    case CUDA_R_8F_E4M3:
    case CUDA_R_8F_E5M2: return FP8;
    default: return tf32 ? TF32 : FP32;
    }
}

static size_t bytes_of(enum dtype_peak type) {
    return type == FP64 ? 8 : type == FP8 ? 1 : type == BF16 || type == FP16 ? 2 : 4;
}

/* Interns a text: the returned name lives as long as the process. */
static const char *kept(const char *text) {
    static struct name {
        struct name *next;
        char text[];
    } *names;
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    struct name *found = names;
    while (found && strcmp(found->text, text)) found = found->next;
    if (!found) {
        found = malloc(sizeof *found + strlen(text) + 1);
        strcpy(found->text, text);
        found->next = names, names = found;
    }
    pthread_mutex_unlock(&lock);
    return found->text;
}

static cublasStatus_t product(cudaStream_t stream, enum dtype_peak type, double m, double n, double k, double batch) {
    char name[128];
    size_t bytes = bytes_of(type) * batch * (m * k + k * n + m * n);
    double flops = 2 * m * n * k * batch, arithmetic = flops / rate(type) * 1e9, memory = memory_time(bytes);
    snprintf(name, sizeof name, "virtual_gemm_%s m%.0f n%.0f k%.0f b%.0f",
             (const char *[]){"f64", "f32", "tf32", "bf16", "f16", "f8"}[type], m, n, k, batch);
    enqueue(stream, &(struct work){KERNEL,
                                   kept(name),
                                   2e3 + (arithmetic > memory ? arithmetic : memory),
                                   bytes,
                                   {device()->multiprocessors, 1, 1},
                                   {384, 1, 1},
                                   flops});
    return CUBLAS_STATUS_SUCCESS;
}

/* ---- cuBLAS ---- */

struct cublasContext {
    cudaStream_t stream;
    cublasMath_t math;
    cublasPointerMode_t pointers;
};

static bool tf32(cublasHandle_t h) { return (h->math & 0xf) == CUBLAS_TF32_TENSOR_OP_MATH; }

API cublasStatus_t cublasCreate_v2(cublasHandle_t *handle) {
    if (ready()) return CUBLAS_STATUS_NOT_INITIALIZED;
    *handle = calloc(1, sizeof **handle);
    return CUBLAS_STATUS_SUCCESS;
}

API cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) { return free(handle), CUBLAS_STATUS_SUCCESS; }

#define SETTING(set, get, type, field)                                                                           \
    API cublasStatus_t set(cublasHandle_t h, type value) { return h->field = value, CUBLAS_STATUS_SUCCESS; }     \
    API cublasStatus_t get(cublasHandle_t h, type *value) { return *value = h->field, CUBLAS_STATUS_SUCCESS; }
SETTING(cublasSetStream_v2, cublasGetStream_v2, cudaStream_t, stream)
SETTING(cublasSetMathMode, cublasGetMathMode, cublasMath_t, math)
SETTING(cublasSetPointerMode_v2, cublasGetPointerMode_v2, cublasPointerMode_t, pointers)

API cublasStatus_t cublasGetVersion_v2(cublasHandle_t handle, int *version) {
    return *version = CUBLAS_VERSION, CUBLAS_STATUS_SUCCESS;
}
API const char *cublasGetStatusString(cublasStatus_t status) { return status ? "virtual cuBLAS: error" : "success"; }
API const char *cublasGetStatusName(cublasStatus_t status) {
    return status ? "CUBLAS_STATUS_NOT_SUPPORTED" : "CUBLAS_STATUS_SUCCESS";
}

#define SIZES cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n, int k

API cublasStatus_t cublasSgemm_v2(SIZES, const float *alpha, const float *a, int lda, const float *b, int ldb,
                                  const float *beta, float *c, int ldc) {
    return product(handle->stream, peak_of(CUDA_R_32F, tf32(handle)), m, n, k, 1);
}

API cublasStatus_t cublasDgemm_v2(SIZES, const double *alpha, const double *a, int lda, const double *b, int ldb,
                                  const double *beta, double *c, int ldc) {
    return product(handle->stream, FP64, m, n, k, 1);
}

API cublasStatus_t cublasSgemmStridedBatched(SIZES, const float *alpha, const float *a, int lda, long long step_a,
                                             const float *b, int ldb, long long step_b, const float *beta, float *c,
                                             int ldc, long long step_c, int count) {
    return product(handle->stream, peak_of(CUDA_R_32F, tf32(handle)), m, n, k, count);
}

API cublasStatus_t cublasDgemmStridedBatched(SIZES, const double *alpha, const double *a, int lda, long long step_a,
                                             const double *b, int ldb, long long step_b, const double *beta, double *c,
                                             int ldc, long long step_c, int count) {
    return product(handle->stream, FP64, m, n, k, count);
}

static bool fast(cublasComputeType_t type) { return type == CUBLAS_COMPUTE_32F_FAST_TF32; }

API cublasStatus_t cublasGemmEx(SIZES, const void *alpha, const void *a, cudaDataType type_a, int lda, const void *b,
                                cudaDataType type_b, int ldb, const void *beta, void *c, cudaDataType type_c, int ldc,
                                cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
    return product(handle->stream, peak_of(type_a, fast(compute) || tf32(handle)), m, n, k, 1);
}

API cublasStatus_t cublasGemmStridedBatchedEx(SIZES, const void *alpha, const void *a, cudaDataType type_a, int lda,
                                              long long step_a, const void *b, cudaDataType type_b, int ldb,
                                              long long step_b, const void *beta, void *c, cudaDataType type_c, int ldc,
                                              long long step_c, int count, cublasComputeType_t compute,
                                              cublasGemmAlgo_t algorithm) {
    return product(handle->stream, peak_of(type_a, fast(compute) || tf32(handle)), m, n, k, count);
}

/* ---- cuBLASLt: descriptors, of which only sizes and types are kept ---- */

struct layout {
    cudaDataType type;
    uint64_t rows, columns;
    int batch;
};

struct description {
    cublasComputeType_t compute;
    int32_t transposed_a;
};

API size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }

API cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    static char only;
    *handle = (cublasLtHandle_t)&only;
    return CUBLAS_STATUS_SUCCESS;
}

API cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *created, cublasComputeType_t compute,
                                            cudaDataType_t scale) {
    struct description *d = calloc(1, sizeof *d);
    d->compute = compute;
    *created = (cublasLtMatmulDesc_t)d;
    return CUBLAS_STATUS_SUCCESS;
}

API cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) { return free(d), CUBLAS_STATUS_SUCCESS; }

API cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t which,
                                                  const void *value, size_t bytes) {
    /* scales, bias and epilogue have no visible effect */
    if (which == CUBLASLT_MATMUL_DESC_TRANSA) memcpy(&((struct description *)d)->transposed_a, value, sizeof(int32_t));
    return CUBLAS_STATUS_SUCCESS;
}

API cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *created, cudaDataType type, uint64_t rows,
                                              uint64_t columns, int64_t leading) {
    struct layout *l = malloc(sizeof *l);
    *l = (struct layout){type, rows, columns, 1};
    *created = (cublasLtMatrixLayout_t)l;
    return CUBLAS_STATUS_SUCCESS;
}

API cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) { return free(l), CUBLAS_STATUS_SUCCESS; }

API cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t l, cublasLtMatrixLayoutAttribute_t which,
                                                    const void *value, size_t bytes) {
    if (which == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) memcpy(&((struct layout *)l)->batch, value, sizeof(int32_t));
    return CUBLAS_STATUS_SUCCESS;
}

API cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *created) {
    static char only;
    *created = (cublasLtMatmulPreference_t)&only;
    return CUBLAS_STATUS_SUCCESS;
}

/* One algorithm for everything, which needs no workspace: torch allocates its preferred size anyway. */
API cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t d,
                                                  cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                  cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t result,
                                                  cublasLtMatmulPreference_t preference, int wanted,
                                                  cublasLtMatmulHeuristicResult_t results[], int *count) {
    *count = wanted > 0;
    if (wanted > 0) memset(results, 0, sizeof *results);
    return CUBLAS_STATUS_SUCCESS;
}

API cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t description, const void *alpha,
                                  const void *a, cublasLtMatrixLayout_t layout_a, const void *b,
                                  cublasLtMatrixLayout_t layout_b, const void *beta, const void *c,
                                  cublasLtMatrixLayout_t layout_c, void *result, cublasLtMatrixLayout_t layout_result,
                                  const cublasLtMatmulAlgo_t *algorithm, void *workspace, size_t bytes,
                                  cudaStream_t stream) {
    const struct description *d = (const struct description *)description;
    const struct layout *left = (const struct layout *)layout_a, *out = (const struct layout *)layout_result;
    uint64_t inner = d->transposed_a == CUBLAS_OP_N ? left->columns : left->rows;
    return product(stream, peak_of(left->type, fast(d->compute)), out->rows, out->columns, inner,
                   out->batch > 0 ? out->batch : 1);
}
