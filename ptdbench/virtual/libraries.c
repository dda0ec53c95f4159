/* cuBLAS, cuBLASLt, cuDNN: products and convolutions by their sizes; and how long a kernel may take. */
#include "virtual.h"
#include <math.h>
#include "cudnn_version.h"
static double peak(int type) { double tf = type == 0 ? 400 : type == 2 || type == 14 ? 989 : type == 28 || type == 29 ? 1979 : type == 1 ? 67 : 989; return tf * 1e6 * 0.7; }  /* FLOP per microsecond */
static size_t width(int type) { return type == 0 ? 4 : type == 1 ? 8 : type == 28 || type == 29 ? 1 : 2; }
static void gemm(void *stream, int type, double m, double n, double k, double batch) {
    unsigned g[3] = {132, 1, 1}, b[3] = {384, 1, 1}; char name[128]; size_t bytes = width(type) * batch * (m * k + k * n + m * n); double us = 2 * m * n * k * batch / peak(type), mem = bytes / 2.4e6;
    snprintf(name, 128, "%s m%.0f n%.0f k%.0f b%.0f", type == 0 ? "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_cublas" : "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", m, n, k, batch);
    vg_work(KERNEL, strdup(name), stream, 2 + (us > mem ? us : mem), bytes, g, b);
}
struct handle { void *stream; int math, pointer; };
static void *dummy(void) { return calloc(1, 256); }
API R cublasCreate_v2(struct handle **h) { *h = dummy(); return vg_ready() ? 1 : 0; }
API R cublasSetStream_v2(struct handle *h, void *s) { h->stream = s; return 0; }
API R cublasGetStream_v2(struct handle *h, void **s) { *s = h->stream; return 0; }
API R cublasSetMathMode(struct handle *h, int m) { h->math = m; return 0; }
API R cublasGetMathMode(struct handle *h, int *m) { *m = h->math; return 0; }
API R cublasSetPointerMode_v2(struct handle *h, int m) { h->pointer = m; return 0; }
API R cublasGetPointerMode_v2(struct handle *h, int *m) { *m = h->pointer; return 0; }
API R cublasGetVersion_v2(void *h, int *v) { *v = 130100; return 0; }
API size_t cublasLtGetVersion(void) { return 130100; }
API const char *cublasGetStatusString(R r) { return "virtual cuBLAS"; }
API R cublasGemmEx(struct handle *h, int ta, int tb, int m, int n, int k, const void *al, const void *A, int type) { gemm(h->stream, type, m, n, k, 1); return 0; }
API R cublasGemmStridedBatchedEx(struct handle *h, int ta, int tb, int m, int n, int k, const void *al, const void *A, int type, int lda, long sa, const void *B, int tB, int ldb, long sb, const void *be, void *C, int tC, int ldc, long sc, int count) { gemm(h->stream, type, m, n, k, count); return 0; }
API R cublasSgemm_v2(struct handle *h, int ta, int tb, int m, int n, int k) { gemm(h->stream, h->math & 3 ? 0 : 1, m, n, k, 1); return 0; }
API R cublasDgemm_v2(struct handle *h, int ta, int tb, int m, int n, int k) { gemm(h->stream, 1, m, n, k, 1); return 0; }
API R cublasSgemmStridedBatched(struct handle *h, int ta, int tb, int m, int n, int k, const void *al, const void *A, int lda, long sa, const void *B, int ldb, long sb, const void *be, void *C, int ldc, long sc, int count) { gemm(h->stream, h->math & 3 ? 0 : 1, m, n, k, count); return 0; }
struct layout { int type; uint64_t rows, cols; int64_t ld; int batch; }; struct desc { int ta, tb; };
API R cublasLtCreate(void **h) { *h = dummy(); return 0; }
API R cublasLtMatmulDescCreate(struct desc **d, int c, int t) { *d = dummy(); return 0; }
API R cublasLtMatmulDescDestroy(void *d) { free(d); return 0; }
API R cublasLtMatmulDescSetAttribute(struct desc *d, int a, const void *v, size_t n) { if (a == 3) d->ta = *(int *)v; if (a == 4) d->tb = *(int *)v; return 0; }
API R cublasLtMatmulPreferenceCreate(void **d) { *d = dummy(); return 0; }
API R cublasLtMatrixLayoutCreate(struct layout **d, int t, uint64_t r, uint64_t c, int64_t ld) { *d = dummy(); **d = (struct layout){t, r, c, ld, 1}; return 0; }
API R cublasLtMatrixLayoutDestroy(void *d) { free(d); return 0; }
API R cublasLtMatrixLayoutSetAttribute(struct layout *d, int a, const void *v, size_t n) { if (a == 5) d->batch = *(int *)v; return 0; }
API R cublasLtMatmulAlgoGetHeuristic(void *h, void *d, void *a, void *b, void *c, void *dd, void *p, int want, char *res, int *got) { memset(res, 0, 96); *got = 1; return 0; }
API R cublasLtMatmul(void *h, struct desc *d, const void *al, const void *A, struct layout *a, const void *B, struct layout *b, const void *be, const void *C, struct layout *c, void *D, struct layout *dd, void *algo, void *ws, size_t n, void *stream) { gemm(stream, a->type, dd->rows, dd->cols, d->ta ? a->rows : a->cols, a->batch > 0 ? a->batch : 1); return 0; }

/* cuDNN: one engine for everything, without workspace. */
struct handle_dnn { void *stream; };
API R cudnnCreate(void **h) { *h = dummy(); return 0; }
API R cudnnSetStream(struct handle_dnn *h, void *s) { h->stream = s; return 0; }
API R cudnnGetStream(struct handle_dnn *h, void **s) { *s = h->stream; return 0; }
API R cudnnGetProperty(int t, int *v) { size_t n = CUDNN_VERSION; *v = t == 0 ? n / 10000 : t == 1 ? n / 100 % 100 : n % 100; return 0; }
API R cudnnCreateTensorDescriptor(void **d) { *d = dummy(); return 0; }
API R cudnnCreateFilterDescriptor(void **d) { *d = dummy(); return 0; }
API R cudnnCreateConvolutionDescriptor(void **d) { *d = dummy(); return 0; }
API R cudnnCreateActivationDescriptor(void **d) { *d = dummy(); return 0; }
API R cudnnCreateDropoutDescriptor(void **d) { *d = dummy(); return 0; }
API R cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *h, int m, int o, void *x, void *z, void *y, void *b, void *a, size_t *n) { *n = 0; return 0; }
API R cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *h, int m, int o, void *x, void *y, void *dy, void *dz, void *dx, void *b, void *a, size_t *n) { *n = 0; return 0; }
API R cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *h, int m, int o, void *a, void *x, size_t *n) { *n = 0; return 0; }
static R norm(struct handle_dnn *h, const char *n) { unsigned g[3] = {132, 1, 1}, b[3] = {512, 1, 1}; vg_work(KERNEL, n, h->stream, 20, 0, g, b); return 0; }
API R cudnnBatchNormalizationForwardTrainingEx(void *h) { return norm(h, "cudnn::bn_fw_tr_1C11_kernel_NCHW"); }
API R cudnnBatchNormalizationBackwardEx(void *h) { return norm(h, "cudnn::bn_bw_1C11_kernel_new"); }
API R cudnnBatchNormalizationForwardInference(void *h) { return norm(h, "cudnn::bn_fw_inf_1C11_kernel_NCHW"); }
API R cudnnBackendCreateDescriptor(int t, void **d) { *d = dummy(); *(int *)*d = t; return 0; }
API R cudnnBackendDestroyDescriptor(void *d) { free(d); return 0; }
API R cudnnBackendFinalize(void *d) { return 0; }
API R cudnnBackendSetAttribute(void *d, int a, int t, int64_t n, const void *v) { return 0; }
API R cudnnBackendGetAttribute(void *d, int a, int type, int64_t want, int64_t *got, void *v) {
    int64_t dropped; if (!got) got = &dropped;
    *got = type == 15 ? a == 202 || a == 300 || a == 401 : type == 3 || type == 23;   /* descriptors are made by the caller; numbers, workspace among them, are 0 */
    if (*got && want && v && type == 3) *(int64_t *)v = 0; if (*got && want && v && type == 23) *(int32_t *)v = 0; return 0;
}
API R cudnnBackendExecute(struct handle_dnn *h, void *plan, void *pack) { unsigned g[3] = {132, 1, 1}, b[3] = {384, 1, 1}; vg_work(KERNEL, "cudnn_generated_kernel", h->stream, 50, 0, g, b); return 0; }

/* How long a kernel may take, from its name and arguments; and those few that are computed after all, on a few elements. */
static int element(const char *s) { if (strstr(s, "BFloat16") || strstr(s, "4Half")) return 2; return 4; }
static size_t code(const char *p) { return *p == 'f' || *p == 'i' || *p == 'j' ? 4 : *p == 'd' || *p == 'l' || *p == 'm' ? 8 : *p == 'h' || *p == 'a' || *p == 'b' ? 1 : *p == 's' || !strncmp(p, "N3c108BFloat16E", 15) || !strncmp(p, "N3c104HalfE", 11) ? 2 : 0; }
/* Copies of at most so many elements are made: strided ones of one type, and casts of contiguous ones. Layouts as in ATen/native/cuda/CUDALoops.cuh, OffsetCalculator.cuh and MemoryAccess.cuh. */
enum { FEW = 4096, DIMS = 25 };
struct strided { int dims; struct { unsigned size, m, shift; } sizes[DIMS]; unsigned strides[DIMS][2]; char *data[2]; };
static const int nccl_type[] = {1, 0, -1, 2, 4, 6, 7, 8, -1, -1, -1, 1, -1, -1, -1, 9};   /* of a c10::ScalarType */
extern double vg_get(const char *, size_t, int); extern void vg_put(char *, size_t, int, double);
static void copy(const char *name, void **args, size_t count) {
    const char *lambda = strstr(name, "EUl");  size_t w = 0; while (lambda && !w) { w = strncmp(lambda + 3, "vE", 2) ? code(lambda + 3) : 0; lambda = strstr(lambda + 3, "EUl"); }
    if (strstr(name, "18elementwise_kernelILi128") && w && strstr(name, "nocast")) {
        struct strided *x = args[1]; if (x->dims < 1 || x->dims > DIMS) return;
        for (size_t i = 0; i < count; i++) { size_t at = i, o = 0, in = 0; for (int d = 0; d < x->dims; d++) { size_t k = at % x->sizes[d].size; at /= x->sizes[d].size; o += k * x->strides[d][0]; in += k * x->strides[d][1]; } memcpy(x->data[0] + o, x->data[1] + in, w); }
    } else if (strstr(name, "27unrolled_elementwise_kernel") && strstr(name, "LoadWithCast")) {
        char **p = args[2]; unsigned char *from = args[5], *to = args[6]; int a = *from < 16 ? nccl_type[*from] : -1, b = *to < 16 ? nccl_type[*to] : -1; if (a < 0 || b < 0) return;
        for (size_t i = 0; i < count; i++) vg_put(p[0], i, b, vg_get(p[1], i, a));
    }
}
/* The sum of a few contiguous int64, as ATen/native/cuda/Reduce.cuh passes them: the sizes of objects that torch sends. */
extern int vg_on_device(const void *);
static void reduce(const int *op, int all) {
    int count = op[all ? 2 : 5]; int64_t **p = (int64_t **)((char *)op + (all ? 976 : 992));   /* after a neutral element of 1 or 8 bytes, the configuration and two calculators of offsets */
    if (count < 1 || count > 65536 || op[all ? 3 : 6] != 1 || vg_on_device(p[0]) < 0 || vg_on_device(p[1]) < 0) return;
    if (all) { char y = 1; for (int i = 0; i < count; i++) y &= ((char *)p[0])[i]; *(char *)p[1] = y; return; }
    int64_t total = 0; for (int i = 0; i < count; i++) total += p[0][i]; *p[1] = total;
}
static int type(char c) { return c == 'l' ? 4 : c == 'f' ? 7 : c == 'd' ? 8 : c == 'i' ? 2 : c == 'h' ? 1 : c == 'a' ? 0 : -1; }
double vg_guess(const char *name, void **args, const unsigned *g, const unsigned *b, size_t *bytes) {
    const char *p; size_t n = (size_t)g[0] * g[1] * g[2] * b[0] * b[1] * b[2];
    if ((p = strstr(name, "elementwise_kernel")) && args) {
        size_t count = *(int *)args[0], k = 3; const char *q = strstr(p, "arrayIPcLm"); if (q) k = atoi(q + 10); *bytes = count * k * element(name);
        if (strstr(name, "vectorized_elementwise_kernel") && (q = strstr(name, "11FillFunctorI"))) { size_t w = code(q + 14); char **to = args[2]; if (w && count * w <= 65536) for (size_t i = 0; i < count; i++) memcpy(to[0] + i * w, args[1], w); }
        if (count <= FEW && strstr(name, "direct_copy_kernel_cuda")) copy(name, args, count);
        if (count <= FEW && strstr(name, "29vectorized_elementwise_kernel") && strstr(name, "bfloat16_copy_kernel_cuda") && strstr(name, "EEUlfE_")) { char **to = args[2]; for (size_t i = 0; i < count; i++) vg_put(to[0], i, 9, vg_get(to[1], i, 7)); }
        if (!strstr(name, "LoadWithCast") && (strstr(name, "29vectorized") || strstr(name, "27unrolled")) && strstr(name, "14CompareFunctorIlE") && count <= 64) { char **a = args[2]; int op = *(int *)args[1]; for (size_t i = 0; i < count; i++) { int64_t x = ((int64_t *)a[1])[i], y = ((int64_t *)a[2])[i]; a[0][i] = op == 0 ? x >= y : op == 1 ? x > y : op == 2 ? x <= y : x < y; } }
        if (count <= 65536 && !strstr(name, "LoadWithCast") && (strstr(name, "29vectorized_elementwise_kernel") || strstr(name, "27unrolled_elementwise_kernel"))) {   /* a + b, a == b */
            const char *add = strstr(name, "15CUDAFunctor_addI"), *self = strstr(name, "21CUDAFunctorOnSelf_addI"), *eq = strstr(name, "16CompareEqFunctorI"); char **a = args[2]; int t = type(add ? add[18] : self ? self[24] : eq ? eq[19] : 0); const char *f = args[1];
            if (t >= 0) for (size_t i = 0; i < count; i++) { double x = vg_get(a[1], i, t); if (add) vg_put(a[0], i, t, x + vg_get(f, 0, t) * vg_get(a[2], i, t)); else if (self) vg_put(a[0], i, t, x + vg_get(f, 0, t) * vg_get(f, 1, t)); else if (k == 3) a[0][i] = (x == vg_get(a[2], i, t)) != *(int *)f; }
        }
    } else if (strstr(name, "multi_tensor_apply")) *bytes = (size_t)g[0] * 65536 * 4 * (strstr(name, "Adam") ? 7 : 3);
    else *bytes = n * 16;
    if (args && strstr(name, "13reduce_kernel") && strstr(name, "sum_functorIl")) reduce(args[0], 0);
    if (args && strstr(name, "13reduce_kernel") && strstr(name, "15and_kernel_cuda") && strstr(name, "ReduceOpIb")) reduce(args[0], 1);
    return 1.5 + *bytes / 2.4e6;
}
