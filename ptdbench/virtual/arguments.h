/* Names and arguments of ATen's kernels, as the host passes them: layouts that are private to torch. */
#ifndef PTDBENCH_VIRTUAL_ARGUMENTS_H
#define PTDBENCH_VIRTUAL_ARGUMENTS_H

#include "virtual.h"

#define UNKNOWN -1

/* What follows a text in a name; NULL if the name does not contain it. */
static inline const char *after(const char *name, const char *text) {
    const char *found = strstr(name, text);
    return found ? found + strlen(text) : NULL;
}

/* The argument type of the innermost lambda after a text:
 * direct_copy_kernel_cuda(...)::{lambda()#3}::...{lambda(float)#1}. */
static inline const char *lambda_behind(const char *name, const char *text) {
    const char *at = after(name, text);
    while (at && (at = after(at, "{lambda(")) && *at == ')');
    return at;
}

/* computed.c: NCCL's number of the type at the beginning of a text, and of a c10::ScalarType; else UNKNOWN */
int type_named(const char *name);
int type_of_scalar(int scalar_type);

/* ATen/cuda/detail/OffsetCalculator.cuh, with unsigned int as index: dims; for each dimension an IntDivider (divisor,
 * and two numbers by which a device divides); for each dimension the stride in bytes of every tensor. */
enum { MAX_DIMS = 25 };
struct divider {
    uint32_t size, magic, shift;
};
#define OFFSET_CALCULATOR(tensors)           \
    struct {                                 \
        int dims;                            \
        struct divider sizes[MAX_DIMS];      \
        uint32_t strides[MAX_DIMS][tensors]; \
    }

static inline bool sane(int dims, const struct divider *sizes) {
    if (dims < 0 || dims > MAX_DIMS) return false;
    for (int d = 0; d < dims; d++)
        if (!sizes[d].size) return false;
    return true;
}

/* ReduceConfig of ATen/native/cuda/Reduce.cuh. */
struct reduce_config {
    int element_bytes, inputs, outputs, step_input, step_output, blocks_per_output, input_mult[3], output_mult[2];
    int block_width, block_height, threads;
    bool vectorized;
    int output_vector;
};

#endif
