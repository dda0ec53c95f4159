/* The few kernels that are computed, on few elements: those whose results torch branches on, such as the sizes of
 * objects that ranks send each other.
 *
 * Kernels are recognized by name, and their arguments are read by the layouts of ATen's headers, which are private to
 * torch and may change between versions. Each layout is described at the struct that reads it. computed.py tests each
 * kind with the installed torch; PTDBENCH_VIRTUAL_COMPUTED names those that passed, and the others are not computed.
 */
#include "arguments.h"

#include <math.h>
#include <nccl.h>
#include <pthread.h>

#define FEW 65536 /* maximum elements that are computed */
#define OPERANDS 3

enum kind { FILL, CAST, STRIDED, COMPARE, ADD, SUM, ALL, MAX, NONZERO, KINDS };
static bool enabled[KINDS];

static void read_kinds(void) {
    static const char *names[KINDS] = {"fill", "cast", "strided", "compare", "add", "sum", "all", "max", "nonzero"};
    for (int i = 0; i < KINDS; i++) enabled[i] = computes(names[i]);
}

/* ---- NCCL's type numbers, from C++ names and from c10::ScalarType (c10/core/ScalarType.h) ---- */

int type_named(const char *name) {
    static const struct {
        const char *name;
        int type;
    } types[] = {{"float", ncclFloat32},    {"double", ncclFloat64},
                 {"long", ncclInt64},       {"int", ncclInt32},
                 {"bool", ncclUint8},       {"unsigned char", ncclUint8},
                 {"signed char", ncclInt8}, {"c10::BFloat16", ncclBfloat16},
                 {"c10::Half", ncclFloat16}};
    for (size_t i = 0; name && i < sizeof types / sizeof *types; i++) {
        size_t length = strlen(types[i].name);
        if (!strncmp(name, types[i].name, length) &&
            (name[length] == '>' || name[length] == ',' || name[length] == ')'))
            return types[i].type;
    }
    return UNKNOWN;
}

int type_of_scalar(int scalar_type) {
    static const int types[] = {ncclUint8,   ncclInt8,    UNKNOWN, ncclInt32,   ncclInt64, ncclFloat16,
                                ncclFloat32, ncclFloat64, UNKNOWN, UNKNOWN,     UNKNOWN,   ncclUint8,
                                UNKNOWN,     UNKNOWN,     UNKNOWN, ncclBfloat16};
    return scalar_type >= 0 && scalar_type < (int)(sizeof types / sizeof *types) ? types[scalar_type] : UNKNOWN;
}

/* ---- recognition by name ---- */

enum shape {
    OTHER,      /* not computed */
    CONTIGUOUS, /* vectorized_elementwise_kernel, or unrolled_elementwise_kernel without casts */
    CASTING,    /* unrolled_elementwise_kernel whose operands may have types other than the compute type */
    STRIDING,   /* elementwise_kernel with an offset calculator */
    REDUCING,   /* reduce_kernel */
    COUNTING,   /* CUB's last step of a sum: the element count of nonzero, masked_select and indexing by masks */
};

enum variant {
    PLAIN, EQUAL, EQUAL_CONSTANT, ORDER, ORDER_CONSTANT, ADD_TENSOR, ADD_CONSTANT, AND, OR, GREATEST, LEAST
};

struct recipe {
    enum shape shape;
    enum kind kind;
    enum variant variant;
    int inputs;
    int type, result; /* NCCL's numbers of the compute type and the output type */
    bool truth;       /* a bool: everything but 0 becomes 1 */
    int neutral;      /* bytes of a reduction's neutral element */
};

/* Finds what an elementwise kernel computes for each element; the functors are in
 * ATen/native/cuda/{Copy,FillKernel,CompareEQKernel,CompareKernels}.cu and ATen/native/BinaryOps.h. */
static const char *recognise_function(const char *name, struct recipe *r) {
    static const struct {
        const char *text;
        enum kind kind;
        enum variant variant;
        int inputs;
    } functors[] = {
        {"FillFunctor<", FILL, PLAIN, 0},
        {"AUnaryFunctor<", COMPARE, EQUAL_CONSTANT, 1}, /* only with CompareEqFunctor, see below */
        {"CompareEqFunctor<", COMPARE, EQUAL, 2},
        {"CompareFunctor<", COMPARE, ORDER, 2},
        {"compare_scalar_kernel<", COMPARE, ORDER_CONSTANT, 1},
        {"CUDAFunctor_add<", ADD, ADD_TENSOR, 2},
        {"CUDAFunctorOnSelf_add<", ADD, ADD_CONSTANT, 1},
    };
    bool equal = strstr(name, "CompareEqFunctor<");
    for (size_t i = 0; i < sizeof functors / sizeof *functors; i++) {
        const char *type = after(name, functors[i].text);
        if (!type || (functors[i].variant == EQUAL_CONSTANT && !equal)) continue;
        r->kind = functors[i].kind, r->variant = functors[i].variant, r->inputs = functors[i].inputs;
        return type;
    }
    r->kind = CAST, r->variant = PLAIN, r->inputs = 1;
    const char *half = lambda_behind(name, "::float16_copy_kernel_cuda"),
               *bfloat = lambda_behind(name, "::bfloat16_copy_kernel_cuda");
    if (half || bfloat) r->result = half ? ncclFloat16 : ncclBfloat16;
    const char *from = after(name, "::converting_copy_kernel_cuda<"); /* <from, to>, since torch 2.15 */
    if (from) {
        r->result = type_named(after(from, ", "));
        return from;
    }
    return half ? half : bfloat ? bfloat : lambda_behind(name, "::direct_copy_kernel_cuda");
}

static void recognise_elementwise(const char *name, struct recipe *r) {
    const char *tensors = after(name, "std::array<char*, ");
    r->result = UNKNOWN;
    const char *type = recognise_function(name, r);
    r->type = type_named(type);
    if (r->type == UNKNOWN || (tensors && atoi(tensors) != r->inputs + 1)) return;
    r->truth = !strncmp(type, "bool", 4);
    if (r->kind == COMPARE)
        r->result = ncclUint8;
    else if (r->result == UNKNOWN)
        r->result = r->type;
    if (strstr(name, "vectorized_elementwise_kernel<"))
        r->shape = CONTIGUOUS;
    else if (strstr(name, "unrolled_elementwise_kernel<") && strstr(name, "TrivialOffsetCalculator<"))
        r->shape = strstr(name, "LoadWithCast<") ? CASTING : CONTIGUOUS;
    else if (strstr(name, "gpu_kernel_impl_nocast<"))
        r->shape = STRIDING;
}

/* ReduceOp<scalar, func_wrapper_t<result, functor>, index, ...>: functors are empty, and combine two numbers whose type
 * is given by a lambda or a class. */
static void recognise_reduction(const char *name, struct recipe *r) {
    static const struct {
        const char *text;
        enum kind kind;
        enum variant variant;
        bool lambda;
    } functors[] = {
        {"sum_functor<", SUM, PLAIN, true},    {"::and_kernel_cuda(", ALL, AND, true},
        {"::or_kernel_cuda(", ALL, OR, true},  {"MaxNanFunctor<", MAX, GREATEST, false},
        {"MinNanFunctor<", MAX, LEAST, false},
    };
    const char *scalar = after(name, "ReduceOp<"), *of = after(name, "func_wrapper_t<"), *pair = NULL;
    for (size_t i = 0; !pair && i < sizeof functors / sizeof *functors; i++) {
        pair = (functors[i].lambda ? lambda_behind : after)(name, functors[i].text);
        r->kind = functors[i].kind, r->variant = functors[i].variant;
    }
    if (!of || !pair || !strstr(name, ", unsigned int, ")) return;
    r->type = type_named(scalar), r->result = type_named(of);
    r->neutral = size_of(type_named(pair));
    if (r->type != UNKNOWN && r->result != UNKNOWN && type_named(pair) != UNKNOWN) r->shape = REDUCING;
}

const struct recipe *recognise(const char *name) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, read_kinds);
    struct recipe *r = calloc(1, sizeof *r);
    if (strstr(name, "elementwise_kernel<") && !strstr(name, "index_elementwise"))
        recognise_elementwise(name, r);
    else if (strstr(name, "::reduce_kernel<"))
        recognise_reduction(name, r);
    else if (strstr(name, "DeviceReduceSingleTileKernel<"))
        r->shape = COUNTING, r->kind = NONZERO;
    if (!enabled[r->kind] || (r->shape == STRIDING && !enabled[STRIDED])) r->shape = OTHER;
    return r;
}

/* ---- addresses of the elements of a kernel's tensors ---- */

/* The offset of the index-th element of one tensor. */
static size_t offset(int dims, const struct divider *sizes, const uint32_t *strides, int tensors, int tensor,
                     size_t index) {
    size_t bytes = 0;
    for (int d = 0; d < dims; d++) {
        bytes += index % sizes[d].size * strides[d * tensors + tensor];
        index /= sizes[d].size;
    }
    return bytes;
}

/* The tensors of an elementwise kernel, the output first. */
struct tensors {
    int count;
    char *data[OPERANDS];
    int types[OPERANDS];
    int dims; /* -1: contiguous */
    const struct divider *sizes;
    const uint32_t *strides;
};

static char *element(const struct tensors *t, int tensor, size_t index) {
    if (t->dims < 0) return t->data[tensor] + index * size_of(t->types[tensor]);
    return t->data[tensor] + offset(t->dims, t->sizes, t->strides, t->count, tensor, index);
}

/* ---- elementwise kernels: ATen/native/cuda/CUDALoops.cuh ---- */

/* Extracts the tensors and the functor from a kernel's arguments; false if they are implausible. */
static bool read_tensors(const struct recipe *r, void **arguments, struct tensors *t, const char **functor) {
    *t = (struct tensors){.count = r->inputs + 1, .dims = -1, .types = {r->result, r->type, r->type}};
    if (r->shape == STRIDING) {
        /* (int count, closure of gpu_kernel_impl_nocast: offset calculator, std::array<char *, tensors>, functor) */
        char *closure = arguments[1];
        size_t strides = sizeof(int) + MAX_DIMS * sizeof(struct divider),
               data = strides + MAX_DIMS * sizeof(uint32_t) * t->count;
        data = (data + sizeof(char *) - 1) / sizeof(char *) * sizeof(char *);
        t->dims = *(int *)closure;
        t->sizes = (struct divider *)(closure + sizeof(int)), t->strides = (uint32_t *)(closure + strides);
        memcpy(t->data, closure + data, t->count * sizeof(char *));
        *functor = closure + data + t->count * sizeof(char *);
        return sane(t->dims, t->sizes);
    }
    /* (int count, functor, std::array<char *, tensors>; if unrolled also offset calculators of inputs and output,
     * loader, storer) */
    *functor = arguments[1];
    memcpy(t->data, arguments[2], t->count * sizeof(char *));
    if (r->shape == CASTING) {
        /* LoadWithCast and StoreWithCast (MemoryAccess.cuh) begin with each tensor's c10::ScalarType, a byte each */
        const int8_t *loader = arguments[5], *storer = arguments[6];
        t->types[0] = type_of_scalar(storer[0]);
        for (int i = 0; i < r->inputs; i++) t->types[i + 1] = type_of_scalar(loader[i]);
    }
    return true;
}

/* Bytes from a tensor's first element to the end of its last one. */
static size_t span_of(const struct tensors *t, int tensor, size_t count) {
    return element(t, tensor, count - 1) - t->data[tensor] + size_of(t->types[tensor]);
}

/* Whether all elements are on a device, and the output is writable. Strides are positive: torch flips by other kernels.
 */
static bool within(const struct tensors *t, size_t count) {
    for (int i = 0; i < t->count; i++) {
        if (t->types[i] == UNKNOWN) return false;
        size_t span = span_of(t, i, count);
        if (!(i ? readable(t->data[i], span) : writable(t->data[i], span))) return false;
    }
    return true;
}

static bool compare(int op, bool equality, double a, double b) {
    if (equality) return (a == b) != (op == 1);                           /* EqOpType: EQ, NE */
    return op == 0 ? a >= b : op == 1 ? a > b : op == 2 ? a <= b : a < b; /* OpType: GE, GT, LE, LT */
}

/* out = f(a, b). The functor of a comparison begins with its operation, an enum; the constant, if any, follows in the
 * type of the elements, aligned to its size. The functor of an addition holds alpha, or the constant and alpha, in
 * at::opmath_type: float for 16-bit types. */
static double apply(const struct recipe *r, const char *functor, double a, double b) {
    int op = 0, opmath = size_of(r->type) == 2 ? ncclFloat32 : r->type;
    const char *constant = functor + (size_of(r->type) > sizeof op ? size_of(r->type) : sizeof op);
    if (r->kind == COMPARE) memcpy(&op, functor, sizeof op);
    switch (r->variant) {
    case EQUAL: return compare(op, true, a, b);
    case EQUAL_CONSTANT: return compare(op, true, a, get_number(constant, 0, r->type));
    case ORDER: return compare(op, false, a, b);
    case ORDER_CONSTANT: return compare(op, false, a, get_number(constant, 0, r->type));
    case ADD_TENSOR: return a + get_number(functor, 0, opmath) * b;
    case ADD_CONSTANT: return a + get_number(functor, 1, opmath) * get_number(functor, 0, opmath);
    default: return r->kind == FILL ? get_number(functor, 0, r->type) : a;
    }
}

static void compute_elementwise(const struct recipe *r, void **arguments) {
    struct tensors t;
    const char *functor;
    int count = *(int *)arguments[0];
    if (count < 1 || count > FEW || !read_tensors(r, arguments, &t, &functor) || !within(&t, count)) return;
    bool copied = r->kind == CAST && t.types[0] == t.types[1] && !r->truth;
    for (int i = 0; i < count; i++) {
        if (copied) {
            memcpy(element(&t, 0, i), element(&t, 1, i), size_of(t.types[0]));
            continue;
        }
        double a = t.count > 1 ? get_number(element(&t, 1, i), 0, t.types[1]) : 0;
        double b = t.count > 2 ? get_number(element(&t, 2, i), 0, t.types[2]) : 0;
        double value = apply(r, functor, a, b);
        put_number(element(&t, 0, i), 0, t.types[0], r->truth ? value != 0 : value);
    }
    bool all_known = true;
    for (int i = 1; i < t.count; i++) all_known = all_known && known(t.data[i], span_of(&t, i, count));
    know(t.data[0], span_of(&t, 0, count), all_known);
}

/* ---- reductions: ReduceOp of ATen/native/cuda/Reduce.cuh ---- */

/* Follows the functor (empty, 1 byte) and the neutral element in the compute type. */
struct reduction {
    struct reduce_config config;
    OFFSET_CALCULATOR(1) input;
    OFFSET_CALCULATOR(2) output; /* of each output, and of its first input */
};

static double combine(enum variant variant, double a, double b) {
    switch (variant) {
    case AND: return a && b;
    case OR: return a || b;
    case GREATEST: return isnan(b) || b > a ? b : a;
    case LEAST: return isnan(b) || b < a ? b : a;
    default: return a + b;
    }
}

/* Of values that are not known, the result is that of a healthy program: none is infinite or not a number, all are
 * finite, and no loop goes on until the last one is. */
static void compute_reduction(const struct recipe *r, void **arguments) {
    size_t config = 2 * r->neutral; /* after the functor, the neutral element is aligned to its size, the rest to 4 */
    const char *op = (const char *)arguments[0] + (config + 3) / 4 * 4;
    const struct reduction *x = (const struct reduction *)op;
    size_t pointers = (size_t)(op + sizeof *x - (char *)arguments[0]); /* source and destination follow, aligned to 8 */
    char *data[2];
    memcpy(data, (char *)arguments[0] + (pointers + 7) / 8 * 8, sizeof data);
    int inputs = x->config.inputs, outputs = x->config.outputs;
    if (inputs < 1 || outputs < 1 || outputs > FEW) return;
    if (!sane(x->input.dims, x->input.sizes) || !sane(x->output.dims, x->output.sizes)) return;
    bool few = inputs <= FEW && outputs <= FEW / inputs, all_known = few;
    for (int o = 0; o < outputs; o++) {
        char *to = data[1] + offset(x->output.dims, x->output.sizes, x->output.strides[0], 2, 0, o);
        char *from = data[0] + offset(x->output.dims, x->output.sizes, x->output.strides[0], 2, 1, o);
        double value = r->variant == AND ? 1 : r->variant == GREATEST ? -INFINITY : r->variant == LEAST ? INFINITY : 0;
        char *last = from + offset(x->input.dims, x->input.sizes, x->input.strides[0], 1, 0, inputs - 1);
        bool is_known = few && readable(from, last - from + 1) && known(from, last - from + size_of(r->type));
        for (int i = 0; is_known && i < inputs; i++) {
            char *at = from + offset(x->input.dims, x->input.sizes, x->input.strides[0], 1, 0, i);
            value = combine(r->variant, value, get_number(at, 0, r->type));
        }
        if (!writable(to, size_of(r->result))) return;
        put_number(to, 0, r->result, is_known ? value : r->variant == AND);
        all_known = all_known && is_known;
    }
    size_t last = offset(x->output.dims, x->output.sizes, x->output.strides[0], 2, 0, outputs - 1);
    know(data[1], last + size_of(r->result), all_known);
}

/* Sets a count to 0, so that torch creates an empty tensor rather than one of arbitrary size: (input, output, ...). */
static void compute_count(void **arguments) {
    char *count = *(char **)arguments[1];
    if (device_of(count) >= 0) zero(count, sizeof(int));
}

void compute(const struct recipe *r, void **arguments) {
    switch (r->shape) {
    case CONTIGUOUS:
    case CASTING:
    case STRIDING: compute_elementwise(r, arguments); break;
    case REDUCING: compute_reduction(r, arguments); break;
    case COUNTING: compute_count(arguments); break;
    case OTHER: break;
    }
}
