/* cuBLAS and cuBLASLt: products do not write their results. Workspaces are the caller's. */
#include "virtual.h"

#include <cublasLt.h>
#include <cublas_v2.h>
#include <nccl.h>
#include <pthread.h>

/* ---- a product ---- */

/* NCCL's number of the type in which a product is computed, or that of TF32. */
static int arithmetic_of(cudaDataType type, bool tf32) {
    switch (type) {
    case CUDA_R_64F: return ncclFloat64;
    case CUDA_R_16F: return ncclFloat16;
    case CUDA_R_16BF: return ncclBfloat16;
    case CUDA_R_8F_E4M3:
    case CUDA_R_8F_E5M2: return FP8_NUMBER;
    default: return tf32 ? TF32_NUMBER : ncclFloat32;
    }
}

const char *kept(const char *text) {
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

/* A product of column-major matrices, as cuBLAS has them: the result has m rows, n columns and the type `result`. */
struct product {
    int type;
    cudaDataType result;
    double m, n, k, batch;
    bool transposed_a, transposed_b, accumulates;
    int epilogue;
};

/* Sets what the work of a product reads, writes and computes. */
static void describe(struct work *work, struct product p) {
    int result = arithmetic_of(p.result, false);
    size_t of_result = size_of(result) * (p.accumulates ? 2 : 1);
    work->bytes = p.batch * (size_of(p.type) * (p.m * p.k + p.k * p.n) + of_result * p.m * p.n);
    work->flops = 2 * p.m * p.n * p.k * p.batch;
    work->detail = (struct detail){{p.m, p.n, p.k, p.batch, p.epilogue}, p.accumulates ? ACCUMULATES : 0,
                                   NUMBER_OF(p.type), NUMBER_OF(result), 2 * p.transposed_a + p.transposed_b};
}

static cublasStatus_t product(cudaStream_t stream, struct product p) {
    static const char *const names[] = {[ncclFloat64] = "f64",   [ncclFloat32] = "f32", [TF32_NUMBER] = "tf32",
                                        [ncclBfloat16] = "bf16", [ncclFloat16] = "f16", [FP8_NUMBER] = "f8"};
    char name[128];
    snprintf(name, sizeof name, "virtual_gemm_%s m%.0f n%.0f k%.0f b%.0f", names[p.type], p.m, p.n, p.k, p.batch);
    struct work work = {KERNEL, kept(name), .grid = {device()->multiprocessors, 1, 1}, .block = {384, 1, 1}};
    describe(&work, p);
    enqueue(stream, &work);
    return CUBLAS_STATUS_SUCCESS;
}

/* For computed.py: a product of groups in bf16, of their mean sizes, by CUTLASS's next kernel in this thread. */
static __thread struct product grouped;
API void ptdbench_virtual_grouped(double m, double n, double k, double groups) {
    grouped = (struct product){ncclBfloat16, CUDA_R_16BF, m, n, k, groups};
}

void describe_grouped(struct work *work) {
    if (grouped.batch && strstr(work->name, "device_kernel")) describe(work, grouped), grouped.batch = 0;
}

/* Whether a product is added to what its result holds: by the factor beta, unless that is on a device. */
static bool adds(const void *beta, bool is_double) {
    static const double zero;
    return beta && device_of(beta) < 0 && memcmp(beta, &zero, is_double ? sizeof(double) : sizeof(float));
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

/* A product by the arguments of a call of cuBLAS. */
#define PRODUCT(of_type, of_result, of_batch) \
    product(handle->stream, (struct product){of_type, of_result, m, n, k, of_batch, transa != CUBLAS_OP_N, \
                                             transb != CUBLAS_OP_N, adds(beta, of_result == CUDA_R_64F)})

API cublasStatus_t cublasSgemm_v2(SIZES, const float *alpha, const float *a, int lda, const float *b, int ldb,
                                  const float *beta, float *c, int ldc) {
    return PRODUCT(arithmetic_of(CUDA_R_32F, tf32(handle)), CUDA_R_32F, 1);
}

API cublasStatus_t cublasDgemm_v2(SIZES, const double *alpha, const double *a, int lda, const double *b, int ldb,
                                  const double *beta, double *c, int ldc) {
    return PRODUCT(ncclFloat64, CUDA_R_64F, 1);
}

API cublasStatus_t cublasSgemmStridedBatched(SIZES, const float *alpha, const float *a, int lda, long long step_a,
                                             const float *b, int ldb, long long step_b, const float *beta, float *c,
                                             int ldc, long long step_c, int count) {
    return PRODUCT(arithmetic_of(CUDA_R_32F, tf32(handle)), CUDA_R_32F, count);
}

API cublasStatus_t cublasDgemmStridedBatched(SIZES, const double *alpha, const double *a, int lda, long long step_a,
                                             const double *b, int ldb, long long step_b, const double *beta, double *c,
                                             int ldc, long long step_c, int count) {
    return PRODUCT(ncclFloat64, CUDA_R_64F, count);
}

static bool fast(cublasComputeType_t type) { return type == CUBLAS_COMPUTE_32F_FAST_TF32; }

API cublasStatus_t cublasGemmEx(SIZES, const void *alpha, const void *a, cudaDataType type_a, int lda, const void *b,
                                cudaDataType type_b, int ldb, const void *beta, void *c, cudaDataType type_c, int ldc,
                                cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
    return PRODUCT(arithmetic_of(type_a, fast(compute) || tf32(handle)), type_c, 1);
}

API cublasStatus_t cublasGemmStridedBatchedEx(SIZES, const void *alpha, const void *a, cudaDataType type_a, int lda,
                                              long long step_a, const void *b, cudaDataType type_b, int ldb,
                                              long long step_b, const void *beta, void *c, cudaDataType type_c, int ldc,
                                              long long step_c, int count, cublasComputeType_t compute,
                                              cublasGemmAlgo_t algorithm) {
    return PRODUCT(arithmetic_of(type_a, fast(compute) || tf32(handle)), type_c, count);
}

/* ---- cuBLASLt: descriptors, of which only sizes and types are kept ---- */

struct layout {
    cudaDataType type;
    uint64_t rows, columns;
    int batch;
};

struct description {
    cublasComputeType_t compute;
    int32_t transposed_a, transposed_b, epilogue;
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
    struct description *to = (struct description *)d; /* without scales and bias, which have no visible effect */
    int32_t *kept_here = which == CUBLASLT_MATMUL_DESC_TRANSA     ? &to->transposed_a
                         : which == CUBLASLT_MATMUL_DESC_TRANSB   ? &to->transposed_b
                         : which == CUBLASLT_MATMUL_DESC_EPILOGUE ? &to->epilogue
                                                                  : NULL;
    if (kept_here) memcpy(kept_here, value, sizeof *kept_here);
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
    return product(stream, (struct product){arithmetic_of(left->type, fast(d->compute)), out->type, out->rows, out->columns, inner,
                                            out->batch > 0 ? out->batch : 1, d->transposed_a != CUBLAS_OP_N,
                                            d->transposed_b != CUBLAS_OP_N,
                                            adds(beta, d->compute == CUBLAS_COMPUTE_64F), d->epilogue});
}
