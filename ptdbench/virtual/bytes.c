/* Bytes that a kernel reads and writes, by family: from its name, its arguments and its grid. What is not known is guessed
 * from the number of threads, and said to be.
 *
 * Each tensor counts once: an element that several threads read comes from the cache. A kernel that is in no family below,
 * or whose arguments are implausible, is a guess, and so is what depends on the values of a tensor.
 */
#include "arguments.h"

#include <nccl.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST_TENSORS = 8 };

struct call {
    const struct family *family;
    void **arguments;
    dim3 grid, block;
    bool guessed; /* set where the bytes are */
    struct detail *detail;
};

struct family {
    size_t (*bytes)(struct call *call);
    int tensors;               /* of an elementwise kernel, the output first */
    size_t sizes[MOST_TENSORS]; /* bytes of an element of each tensor */
    int numbers[4];            /* of the name, as its reader says */
    bool is_known;             /* the sizes are no guess */
};

/* ---- reading names and arguments ---- */

/* Bytes of the C++ type at the beginning of a text; 0: unknown. */
static size_t size_named(const char *name) {
    static const struct {
        const char *name;
        size_t bytes;
    } types[] = {{"c10::complex<float>", 8}, {"c10::complex<double>", 16}, {"c10::complex<c10::Half>", 4},
                 {"c10::Float8_", 1},        {"unsigned long", 8},         {"unsigned int", 4},
                 {"unsigned short", 2},      {"short", 2},
                 {"at::native::(anonymous namespace)::OpaqueType<", 0}};
    for (size_t i = 0; name && i < sizeof types / sizeof *types; i++) {
        size_t length = strlen(types[i].name);
        if (!strncmp(name, types[i].name, length)) return types[i].bytes ? types[i].bytes : (size_t)atoi(name + length);
    }
    int type = type_named(name);
    return type == UNKNOWN ? 0 : size_of(type);
}

static size_t size_of_scalar(int scalar_type) {
    static const uint8_t sizes[] = {1, 1, 2, 4, 8, 2, 4, 8, 4, 8, 16, 1, 1, 1, 4, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    return scalar_type >= 0 && scalar_type < (int)sizeof sizes ? sizes[scalar_type] : 0;
}

/* The next of some template arguments or parameters; NULL after the last one. */
static const char *next_argument(const char *at) {
    int depth = 0;
    for (; at && *at; at++) {
        if (*at == '<' || *at == '(' || *at == '{') depth++;
        if (*at == '>' || *at == ')' || *at == '}') depth--;
        if (depth < 0) return NULL;
        if (*at == ',' && !depth) return at + 2;
    }
    return NULL;
}

static const char *argument(const char *first, int number) {
    while (first && number--) first = next_argument(first);
    return first;
}

static int int_at(const struct call *c, int number) { return *(int *)c->arguments[number]; }
static int64_t long_at(const struct call *c, int number) { return *(int64_t *)c->arguments[number]; }

static size_t blocks(const struct call *c) { return (size_t)c->grid.x * c->grid.y * c->grid.z; }

static size_t guess(struct call *c) {
    c->guessed = true;
    return blocks(c) * c->block.x * c->block.y * c->block.z * 16;
}

/* ---- elementwise kernels: ATen/native/cuda/CUDALoops.cuh ---- */

static size_t total_size(const struct family *f) {
    size_t bytes = 0;
    for (int t = 0; t < f->tensors; t++) bytes += f->sizes[t];
    return bytes;
}

static size_t bytes_contiguous(struct call *c) {
    c->guessed = !c->family->is_known;
    return total_size(c->family) * int_at(c, 0);
}

/* (int count, functor, std::array<char *, tensors>, offset calculators, LoadWithCast, StoreWithCast); the last two begin
 * with each tensor's c10::ScalarType, a byte each. */
static size_t bytes_casting(struct call *c) {
    const int8_t *loads = c->arguments[5], *stores = c->arguments[6];
    size_t bytes = size_of_scalar(stores[0]);
    for (int t = 1; t < c->family->tensors; t++) bytes += size_of_scalar(loads[t - 1]);
    return bytes * int_at(c, 0);
}

/* The c10::ScalarType of each tensor, after a functor of unknown size, perhaps an address; NULL if there are none. */
static const int8_t *types_after(const char *functor, int tensors) {
    uint64_t first = *(const uint64_t *)functor;
    for (int bytes = first >> 40 && !(first >> 47) ? 8 : 1, count = 0; bytes <= 16; bytes += bytes < 4 ? 3 : 4, count = 0) {
        const int8_t *types = (const int8_t *)functor + bytes;
        while (count < tensors && size_of_scalar(types[count])) count++;
        if (count == tensors) return types;
    }
    return NULL;
}

/* (int count, closure: offset calculator, std::array<char *, tensors>, functor, and where it casts a c10::ScalarType of
 * each tensor). A dimension of stride 0 is read once. */
static size_t bytes_strided(struct call *c) {
    const struct family *f = c->family;
    const char *closure = c->arguments[1];
    int dims = *(int *)closure;
    const struct divider *sizes = (struct divider *)(closure + sizeof dims);
    const uint32_t *strides = (uint32_t *)(closure + sizeof dims + MAX_DIMS * sizeof *sizes);
    const char *data = (const char *)(strides + MAX_DIMS * f->tensors);
    data += -(size_t)data % sizeof(char *);
    const int8_t *types = f->numbers[0] ? types_after(data + f->tensors * sizeof(char *), f->tensors) : NULL;
    if (!sane(dims, sizes)) return guess(c);
    c->guessed = f->numbers[0] ? !types : !f->is_known;
    size_t bytes = 0;
    for (int t = 0; t < f->tensors; t++) {
        size_t elements = types ? size_of_scalar(types[t]) : f->sizes[t];
        for (int d = 0; d < dims; d++)
            if (strides[d * f->tensors + t]) elements *= sizes[d].size;
        bytes += elements;
    }
    return bytes;
}

/* Reads the types of a functor's result and arguments; false if the name does not say them. */
static bool read_functor(const char *functor, struct family *f) {
    const char *binary = after(functor, "BinaryFunctor<"), *unary_a = after(functor, "AUnaryFunctor<"),
               *unary_b = after(functor, "BUnaryFunctor<"), *any = binary ? binary : unary_a ? unary_a : unary_b;
    if (any) {
        f->sizes[0] = size_named(argument(any, 2));
        f->sizes[1] = size_named(argument(any, any == unary_a));
        f->sizes[2] = size_named(argument(any, 1));
        return f->tensors == (binary ? 3 : 2);
    }
    const char *same = after(functor, "_add<"), *compared = after(functor, "CompareFunctor<");
    same = same ? same : after(functor, "FillFunctor<");
    compared = compared ? compared : after(functor, "CompareEqFunctor<");
    for (int t = 0; (same || compared) && t < f->tensors; t++) f->sizes[t] = size_named(same ? same : compared);
    if (compared) f->sizes[0] = 1;
    if (same || compared) return true;
    /* a lambda, whose result has the type of its first argument that is not bool */
    const char *at = lambda_behind(functor, ""), *result = after(functor, "converting_copy_kernel_cuda<");
    for (int t = 1; at && t < f->tensors; t++, at = next_argument(at)) {
        f->sizes[t] = size_named(at);
        if (!f->sizes[0] || (f->sizes[0] == 1 && !strncmp(argument(lambda_behind(functor, ""), 0), "bool", 4)))
            f->sizes[0] = f->sizes[t];
        if (t + 1 == f->tensors && next_argument(at)) return false;
    }
    if (result) f->sizes[1] = size_named(result), f->sizes[0] = size_named(argument(result, 1));
    if (strstr(functor, "float16_copy_kernel")) f->sizes[0] = 2; /* also of bfloat16 */
    if (strstr(functor, "compare_scalar_kernel") || strstr(functor, "logical_not_kernel")) f->sizes[0] = 1;
    return true;
}

/* Tensors of a functor that a closure calls: the result and its arguments, of which a lambda names the types. */
static int tensors_of(const char *functor) {
    const char *at = lambda_behind(functor, ""), *copy = after(functor, "converting_copy_kernel_cuda<");
    const char *end = strstr(copy && at ? at : functor, ">(at::TensorIteratorBase&");
    int arguments = strstr(functor, "UnaryFunctor<") || strstr(functor, "FunctorOn") ? 1 : 2;
    if (strstr(functor, "FillFunctor<")) return 1;
    if (at && at < end) arguments = 0;
    for (; at && at < end; at = next_argument(at)) arguments++;
    return arguments + 1;
}

static void read_elementwise(const char *name, struct family *f) {
    const char *strided = after(name, "gpu_kernel_impl_nocast<"), *casting = after(name, "gpu_kernel_impl<");
    const char *unrolled = after(name, "unrolled_elementwise_kernel<"), *count = after(name, "std::array<char*, ");
    const char *functor = unrolled ? unrolled : next_argument(after(name, "elementwise_kernel<"));
    bool calls = strided || casting;
    if (calls) functor = strided ? strided : casting;
    f->tensors = calls ? tensors_of(functor) : count ? atoi(count) : 0;
    if (f->tensors < 1 || f->tensors > MOST_TENSORS || !functor) return;
    f->bytes = calls ? bytes_strided : strstr(name, "LoadWithCast<") ? bytes_casting : bytes_contiguous;
    f->numbers[0] = casting && !strided;
    f->is_known = read_functor(functor, f);
    for (int t = 0; t < f->tensors; t++) {
        f->is_known = f->is_known && f->sizes[t];
        if (!f->sizes[t]) f->sizes[t] = strstr(functor, "BFloat16") || strstr(functor, "c10::Half") ? 2 : 4;
    }
}

/* ---- reductions: ATen/native/cuda/Reduce.cuh ---- */

/* Finds the ReduceConfig in a ReduceOp, which follows the functor and its neutral element, whatever their sizes. */
static const struct reduce_config *config_of(const char *op) {
    for (int at = 0; at < 64; at += sizeof(int)) {
        const struct reduce_config *x = (const struct reduce_config *)(op + at);
        bool is = x->element_bytes > 0 && x->element_bytes <= 32 && x->inputs > 0 && x->outputs > 0 &&
                  x->block_width > 0 && x->block_height > 0 && x->threads <= 1024 &&
                  x->block_width * x->block_height == x->threads;
        if (is) return x;
    }
    return NULL;
}

static size_t bytes_reduction(struct call *c) {
    const struct reduce_config *x = config_of(c->arguments[0]);
    if (!x) return guess(c);
    c->guessed = !c->family->is_known;
    return (size_t)x->outputs * (x->inputs * c->family->sizes[1] + c->family->sizes[0]);
}

static void read_reduction(const char *name, struct family *f) {
    const char *input = after(name, "ReduceOp<");
    f->bytes = bytes_reduction;
    f->sizes[1] = size_named(input), f->sizes[0] = size_named(argument(input, 3));
    f->is_known = f->sizes[0] && f->sizes[1];
}

/* ---- norms: ATen/native/cuda/layer_norm_kernel.cu ---- */

enum { STATISTIC = 4 }; /* bytes of a mean, or of a reciprocal of a standard deviation */

/* Rows of N elements at argument numbers[0], of which the grid has x; numbers[1] tensors, and numbers[2] weights. */
static size_t bytes_norm(struct call *c) {
    const int *numbers = c->family->numbers;
    size_t size = c->family->sizes[0], n = int_at(c, numbers[0]); /* an int64 is little-endian */
    return c->grid.x * (numbers[1] * n * size + 2 * STATISTIC) + numbers[2] * n * size;
}

/* The gradients of the weights read both inputs once more: (int64 M, int64 N, ...). */
static size_t bytes_norm_weights(struct call *c) {
    size_t size = c->family->sizes[0], m = long_at(c, 0), n = long_at(c, 1);
    return m * (2 * n * size + 2 * STATISTIC) + 2 * n * size;
}

static void read_norm(const char *name, struct family *f) {
    static const struct {
        const char *name;
        int length, tensors, weights; /* (N, ...) or (dY, X, mean, rstd, gamma, dX, N) */
    } norms[] = {{"vectorized_layer_norm_kernel<", 0, 2, 2}, {"RowwiseMomentsCUDAKernel<", 0, 1, 0},
                 {"LayerNormForwardCUDAKernel<", 0, 2, 2},   {"layer_norm_grad_input_kernel_vectorized<", 6, 3, 1},
                 {"layer_norm_grad_input_kernel<", 6, 3, 1}};
    const char *type = after(name, "GammaBetaBackward");
    if ((type = after(type ? type : "", "<"))) f->bytes = bytes_norm_weights, f->sizes[0] = size_named(type);
    for (size_t i = 0; !type && i < sizeof norms / sizeof *norms; i++) {
        if (!(type = after(name, norms[i].name))) continue;
        f->bytes = bytes_norm, f->sizes[0] = size_named(type);
        f->numbers[0] = norms[i].length, f->numbers[1] = norms[i].tensors, f->numbers[2] = norms[i].weights;
    }
    if (!f->sizes[0]) f->bytes = NULL;
}

/* ---- softmax and losses: ATen/native/cuda/SoftMax.cu, PersistentSoftmax.cuh, Loss.cu ---- */

/* Classes at argument numbers[0]; rows at argument numbers[1], or in the grid if that is 0. */
static size_t bytes_softmax(struct call *c) {
    const struct family *f = c->family;
    size_t rows = f->numbers[1] ? (unsigned)int_at(c, f->numbers[1]) : c->grid.x;
    return rows * int_at(c, f->numbers[0]) * total_size(f);
}

static void read_softmax(const char *name, struct family *f) {
    const char *warp = after(name, "softmax_warp_"), *block = after(name, "cunn_SoftMax");
    const char *kind = warp ? warp : block, *types = after(kind, "<");
    bool backward = !strncmp(kind, "ackward", 7) || !strncmp(kind, "backward", 8) || !strncmp(kind, "Backward", 8);
    int at = !warp && types && *types >= '0' && *types <= '9'; /* what a thread loads at once comes first, if it is there */
    const char *first = argument(types, at), *second = argument(types, warp ? 1 : at + 2);
    f->bytes = bytes_softmax, f->tensors = backward ? 3 : 2; /* backward: both the result and its gradient are read */
    f->sizes[0] = size_named(first), f->sizes[1] = f->sizes[2] = size_named(second);
    f->numbers[0] = (warp ? 4 : 2) + backward, f->numbers[1] = warp ? 2 + backward : 0;
    if (!f->sizes[0] || !f->sizes[1]) f->bytes = NULL;
}

/* Rows at argument 6, int64 forward and int backward: an entry of each, and its target. */
static size_t bytes_loss(struct call *c) { return int_at(c, 6) * (sizeof(int64_t) + c->family->sizes[0]); }

/* ---- kernels over lists of tensors: ATen/native/cuda/MultiTensorApply.cuh ---- */

/* The metadata of a launch: addresses of each tensor in `depth` lists, and its elements; a number or address of each
 * tensor, if any; the tensor and chunk of each block. Its sizes are others since CUDA 13. */
struct lists {
    int tensors, blocks, index_bytes;
};

/* Elements in all blocks of a launch; 0 if the arguments are not of this form. */
static size_t elements_of_lists(const char *metadata, struct lists l, int depth, int of_tensor, size_t blocks_launched) {
    enum { CHUNK = 65536 };
    const int64_t *elements = (const int64_t *)metadata + depth * l.tensors;
    const char *tensor = (const char *)(elements + l.tensors) + of_tensor * l.tensors;
    const char *after_tensors = tensor + l.blocks * l.index_bytes;
    const int *chunk = (const int *)(after_tensors + -(size_t)(after_tensors - metadata) % sizeof *chunk);
    size_t total = 0;
    uintptr_t end = (uintptr_t)(chunk + blocks_launched) & -(uintptr_t)getpagesize();
    unsigned char in_memory; /* older metadata is shorter, and may stand at the end of the stack */
    if (mincore((void *)end, 1, &in_memory)) return 0;
    for (size_t b = 0; b < blocks_launched; b++) {
        int t = l.index_bytes == 1 ? ((const uint8_t *)tensor)[b] : ((const uint16_t *)tensor)[b];
        int64_t left = t < l.tensors ? elements[t] - (int64_t)chunk[b] * CHUNK : 0;
        if (chunk[b] < 0 || left <= 0) return 0;
        total += left < CHUNK ? left : CHUNK;
    }
    return total;
}

/* Reads and writes of numbers[0] lists; numbers[1]: bytes of the number of each tensor. */
static size_t bytes_lists(struct call *c) {
    static const int before[] = {110, 64, 48, 36, 30}, since[] = {770, 448, 336, 252, 210};
    static const int before_with_numbers[] = {96, 64, 48, 36, 30}, since_with_numbers[] = {672, 448, 336, 252, 210};
    const struct family *f = c->family;
    int depth = f->tensors, at = depth - 1;
    bool numbers = f->numbers[2];
    size_t launched = blocks(c);
    struct lists new = {(numbers ? since_with_numbers : since)[at], 2240, 2},
                 old = {(numbers ? before_with_numbers : before)[at], 320, 1};
    size_t elements = launched <= 2240 ? elements_of_lists(c->arguments[0], new, depth, f->numbers[1], launched) : 0;
    if (!elements && launched <= 320) elements = elements_of_lists(c->arguments[0], old, depth, f->numbers[1], launched);
    return elements ? elements * f->sizes[0] : guess(c);
}

/* FusedAdamMathFunctor<type, depth, ...> and the like read all lists, and write all but the gradients; functors of
 * foreach operations are named Functor<type, depth, lists that are read, list that is written>. */
static void read_lists(const char *name, struct family *f) {
    const char *metadata = after(name, "ListMetadata<"), *fused = strstr(name, "MathFunctor<");
    const char *of_scalars = after(name, "ScalarListMetadata<");
    const char *functor = after(metadata ? metadata : name, "Functor<");
    f->tensors = atoi(of_scalars ? argument(of_scalars, 1) : metadata ? metadata : "0");
    size_t size = size_named(functor);
    if (!functor || !size || f->tensors < 1 || f->tensors > 5) return;
    f->numbers[2] = of_scalars != NULL;
    f->numbers[1] = of_scalars ? (int)size_named(of_scalars) : strstr(name, "FusedOptimizer") ? (int)sizeof(void *) : 0;
    const char *copied = after(name, "CopyFunctor<"), *read = argument(functor, 2);
    bool once = strstr(name, "NormFunctor<") || strstr(name, "ZeroFunctor<");
    f->sizes[0] = fused    ? size * (2 * f->tensors - 1)
                  : copied ? size + size_named(argument(copied, 1))
                  : once   ? size
                           : size * (atoi(read ? read : "1") + 1);
    f->bytes = bytes_lists;
}

/* ---- concatenation and splitting: ATen/native/cuda/{Shape,TensorShape}.cu ---- */

/* (output, metadata of numbers[0] inputs by value: address, offset, size, elements, ...); the grid's y counts inputs. */
static size_t bytes_concatenation(struct call *c) {
    size_t most = c->family->numbers[0], elements = 0;
    const uint32_t *counts = (const uint32_t *)((const char *)c->arguments[1] + most * (sizeof(void *) + 2 * sizeof(int)));
    if (c->grid.y > most) return guess(c);
    for (size_t i = 0; i < c->grid.y; i++) elements += counts[i];
    return 2 * elements * c->family->sizes[0];
}

static void read_concatenation(const char *name, struct family *f) {
    const char *type = after(strstr(name, "CatArrayBatchedCopy"), "<"), *count = argument(type, 3);
    f->sizes[0] = size_named(type), f->numbers[0] = count ? atoi(count) : 0;
    if (f->sizes[0] && f->numbers[0] > 0) f->bytes = bytes_concatenation;
}

/* (..., int64 bytes of a row of the source, int64 rows): all of each row is split. */
static size_t bytes_splitting(struct call *c) { return 2 * long_at(c, 5) * long_at(c, 6); }

/* (..., int64 slice, int64 bytes of a chunk of the output, int64 ratio of the types): y chunks in each of z slices. */
static size_t bytes_chunks(struct call *c) {
    size_t written = long_at(c, 9) * c->grid.y * c->grid.z, ratio = long_at(c, 10);
    return written + written / (ratio ? ratio : 1);
}

/* ---- rows by their numbers, and random numbers ---- */

/* (output, rows, numbers, int count, int64 bytes of a row, ...) */
static size_t bytes_gathering(struct call *c) { return int_at(c, 3) * (2 * long_at(c, 4) + sizeof(int64_t)); }

/* Gradients of an embedding: partial sums of its segments, which depend on the tokens. */
static __thread size_t embedded; /* elements of the gradient by token, for the kernel that follows */

static size_t bytes_embedding_sums(struct call *c) {
    c->guessed = true, embedded = long_at(c, 3) * long_at(c, 4);
    return embedded * (c->family->sizes[0] + sizeof(float));
}

static size_t bytes_embedding_rows(struct call *c) {
    return c->guessed = true, embedded * (c->family->sizes[0] + sizeof(float));
}

/* (indices, gradients, gradients of weights, int count, int64 length of a row, ...) */
static size_t bytes_embedding_few(struct call *c) {
    return int_at(c, 3) * (3 * long_at(c, 4) * c->family->sizes[0] + sizeof(int64_t));
}

/* (input, output, mask, int elements, ...) */
static size_t bytes_dropout(struct call *c) { return int_at(c, 3) * (2 * c->family->sizes[0] + sizeof(bool)); }

/* (int64 elements, ...), of which only the output is in memory. */
static size_t bytes_written(struct call *c) { return int_at(c, 0) * c->family->sizes[0]; }

/* ---- FlashAttention ---- */

/* Flash_fwd_params, with which Flash_bwd_params begins: addresses and strides of queries, keys and values, heads; of the
 * result; batch and lengths. numbers: products of the kernel, causal; sizes[0] of an element, sizes[1] of one that a
 * kernel around the products reads and writes for each query. */
static size_t bytes_flash(struct call *c) {
    const struct family *f = c->family;
    enum { OF_HEADS = 96, OF_LENGTHS = 176 };
    const char *parameters = c->arguments[0];
    const int *heads = (const int *)(parameters + OF_HEADS), *lengths = (const int *)(parameters + OF_LENGTHS);
    struct detail *d = c->detail;
    int dims[DIMS] = {[BATCH] = lengths[0], [QUERIES] = lengths[1],   [KEYS] = lengths[2],
                      [WIDTH] = lengths[4], [VALUE_WIDTH] = lengths[4], [HEADS] = heads[0],
                      [KEY_HEADS] = heads[1], [PRODUCTS] = f->numbers[0]};
    for (int i = 0; i < PRODUCTS; i++)
        if (dims[i] < 1 || dims[i] > 1 << 24) return guess(c);
    size_t queries = (size_t)dims[BATCH] * dims[HEADS] * dims[QUERIES];
    if (!f->numbers[0]) return queries * dims[WIDTH] * f->sizes[1];
    memcpy(d->dims, dims, sizeof dims);
    d->dtype = d->result = f->numbers[2], d->flags |= f->numbers[1] ? CAUSAL : 0;
    c->guessed = f->numbers[0] > 2; /* it adds to the gradients of queries, in blocks */
    return attention_bytes(d);
}

static void read_flash(const char *name, struct family *f) {
    const char *traits = after(name, "_kernel<");
    bool first_is_causal = strstr(name, "splitkv"), forward = strstr(name, "flash_fwd_"), half = strstr(name, "half_t");
    const char *causal = argument(traits, first_is_causal ? 1 : 2);
    f->numbers[0] = forward && causal ? 2 : strstr(name, "dq_dk_dv") ? 5 : 0;
    f->numbers[1] = causal && !strncmp(causal, "true", 4);
    f->numbers[2] = NUMBER_OF(half ? ncclFloat16 : ncclBfloat16);
    f->sizes[1] = strstr(name, "dot_do_o") ? 8 : 6; /* reads two results and clears the gradient in fp32; converts it */
    f->bytes = bytes_flash;
}

/* ---- families ---- */

/* Families whose element has the type behind a text of the name. */
static const struct {
    const char *name, *type;
    size_t (*bytes)(struct call *);
} simple[] = {
    {"nll_loss_forward_reduce_cuda_kernel_2d<", "2d<", bytes_loss},
    {"nll_loss_backward_reduce_cuda_kernel_2d<", "2d<", bytes_loss},
    {"split_with_sizes_copy_out_contiguous_no_cast_kernel", NULL, bytes_splitting},
    {"chunk_cat_cuda_kernel<", NULL, bytes_chunks},
    {"vectorized_gather_kernel<", NULL, bytes_gathering},
    {"compute_grad_weight<", "weight<", bytes_embedding_sums},
    {"sum_and_scatter<", "scatter<", bytes_embedding_rows},
    {"embedding_backward_feature_kernel<", "kernel<", bytes_embedding_few},
    {"fused_dropout_kernel", "<", bytes_dropout},
    {"distribution_elementwise_grid_stride_kernel<", "_and_transform<", bytes_written},
    {"elementwise_kernel_with_index<", "{lambda(", bytes_written},
};

/* Families that a function reads. */
static const struct {
    const char *name;
    void (*read)(const char *, struct family *);
} by_function[] = {
    {"::reduce_kernel<", read_reduction},      {"layer_norm", read_norm},
    {"GammaBetaBackward", read_norm},          {"LayerNormForward", read_norm},
    {"RowwiseMoments", read_norm},             {"softmax_warp_", read_softmax},
    {"cunn_SoftMaxForward", read_softmax},     {"cunn_SoftMaxBackward", read_softmax},
    {"multi_tensor_apply_kernel", read_lists}, {"CatArrayBatchedCopy", read_concatenation},
    {"elementwise_kernel<", read_elementwise}, {"pytorch_flash::flash_", read_flash},
};

const struct family *family_of(const char *name) {
    struct family *f = calloc(1, sizeof *f);
    for (size_t i = 0; i < sizeof simple / sizeof *simple; i++) {
        if (!strstr(name, simple[i].name)) continue;
        const char *type = simple[i].type ? lambda_behind(name, "") : NULL;
        if (simple[i].type && strcmp(simple[i].type, "{lambda(")) type = after(name, simple[i].type);
        f->sizes[0] = size_named(type);
        if (!simple[i].type || f->sizes[0]) f->bytes = simple[i].bytes;
        return f;
    }
    for (size_t i = 0; i < sizeof by_function / sizeof *by_function; i++)
        if (strstr(name, by_function[i].name)) return by_function[i].read(name, f), f;
    return f;
}

/* ---- kernels whose bytes the program says before it launches them: those of Triton ---- */

static __thread size_t announced;
static __thread bool announced_guess;

API void ptdbench_virtual_bytes(size_t bytes, int guessed) { announced = bytes, announced_guess = guessed; }

size_t bytes_of_call(const struct family *family, void **arguments, dim3 grid, dim3 block, struct detail *detail) {
    struct call call = {family, arguments, grid, block, announced_guess, detail};
    size_t bytes = announced                                ? announced
                   : family && family->bytes && arguments ? family->bytes(&call)
                                                          : guess(&call);
    announced = announced_guess = 0;
    detail->flags |= call.guessed ? GUESSED : 0;
    return bytes;
}
