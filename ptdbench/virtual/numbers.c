/* Numbers of all NCCL types, as doubles: integers above 2^53 lose their last bits, and nothing else is rounded twice.
 */
#include "virtual.h"

#include <math.h>
#include <nccl.h>

/* Floating-point formats of 8 and 16 bits: bits of exponent and fraction. */
struct format {
    int exponent, fraction;
    bool infinities; /* float8_e4m3fn has none: at its largest exponent only the all-ones pattern is NaN */
};
static const struct format half = {5, 10, true}, bfloat = {8, 7, true}, e4m3 = {4, 3, false}, e5m2 = {5, 2, true};

static double decode(unsigned bits, struct format f) {
    unsigned ones = (1u << f.exponent) - 1, exponent = bits >> f.fraction & ones,
             fraction = bits & ((1u << f.fraction) - 1);
    int bias = (1 << (f.exponent - 1)) - 1;
    double value;
    if (exponent == ones && (f.infinities || fraction == (1u << f.fraction) - 1))
        value = fraction ? NAN : INFINITY;
    else if (exponent)
        value = ldexp((1u << f.fraction) + fraction, (int)exponent - bias - f.fraction);
    else
        value = ldexp(fraction, 1 - bias - f.fraction);
    return bits >> (f.exponent + f.fraction) & 1 ? -value : value;
}

/* Rounds to nearest, ties to even. */
static unsigned encode(double value, struct format f) {
    unsigned sign = (unsigned)!!signbit(value) << (f.exponent + f.fraction), ones = (1u << f.exponent) - 1;
    unsigned nan = (ones << f.fraction) | ((1u << f.fraction) - 1), most = f.infinities ? ones << f.fraction : nan;
    int bias = (1 << (f.exponent - 1)) - 1, exponent;
    if (isnan(value)) return sign | nan;
    if (isinf(value)) return sign | most;
    if (!value) return sign;
    frexp(value, &exponent);
    exponent = exponent - 1 < 1 - bias ? 1 - bias : exponent - 1; /* of 1.fraction, or 0.fraction if subnormal */
    double scaled = nearbyint(ldexp(fabs(value), f.fraction - exponent));
    double bits = ldexp(exponent + bias - 1, f.fraction) + scaled; /* a carry increments the exponent */
    return sign | (bits < most ? (unsigned)bits : most);
}

size_t size_of(int type) {
    switch (type) {
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt32:
    case ncclUint32:
    case TF32_NUMBER:
    case ncclFloat32: return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64: return 8;
    default: return 1;
    }
}

double get_number(const void *array, size_t at, int type) {
    const char *p = (const char *)array + at * size_of(type);
    switch (type) {
    case ncclInt8: return *(const int8_t *)p;
    case ncclUint8: return *(const uint8_t *)p;
    case ncclInt32: return *(const int32_t *)p;
    case ncclUint32: return *(const uint32_t *)p;
    case ncclInt64: return *(const int64_t *)p;
    case ncclUint64: return *(const uint64_t *)p;
    case ncclFloat32: return *(const float *)p;
    case ncclFloat64: return *(const double *)p;
    case ncclFloat16: return decode(*(const uint16_t *)p, half);
    case ncclBfloat16: return decode(*(const uint16_t *)p, bfloat);
    case 10: return decode(*(const uint8_t *)p, e4m3); /* ncclFloat8e4m3 and ncclFloat8e5m2, which old headers lack */
    case 11: return decode(*(const uint8_t *)p, e5m2);
    default: return 0;
    }
}

void put_number(void *array, size_t at, int type, double value) {
    char *p = (char *)array + at * size_of(type);
    switch (type) {
    case ncclInt8: *(int8_t *)p = value; break;
    case ncclUint8: *(uint8_t *)p = value; break;
    case ncclInt32: *(int32_t *)p = value; break;
    case ncclUint32: *(uint32_t *)p = value; break;
    case ncclInt64: *(int64_t *)p = value; break;
    case ncclUint64: *(uint64_t *)p = value; break;
    case ncclFloat32: *(float *)p = value; break;
    case ncclFloat64: *(double *)p = value; break;
    case ncclFloat16: *(uint16_t *)p = encode(value, half); break;
    case ncclBfloat16: *(uint16_t *)p = encode(value, bfloat); break;
    case 10: *(uint8_t *)p = encode(value, e4m3); break;
    case 11: *(uint8_t *)p = encode(value, e5m2); break;
    }
}
