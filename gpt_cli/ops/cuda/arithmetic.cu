// The arithmetic of ops/native, with the same bits: sums over a row, e^x, activations, logarithms.
// Each function is the twin of one in ops/native/elementwise.h or kernels.c.

#include "constants.inc"

enum format { FLOAT32, BFLOAT16, FLOAT16, INT8 };

enum activation { NONE, GELU_NEW, GELU, RELU, SILU, TANH };

DEVICE int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }
DEVICE int64_t larger(int64_t x, int64_t y) { return x > y ? x : y; }
DEVICE int smaller(int x, int y) { return x < y ? x : y; }
DEVICE int larger(int x, int y) { return x > y ? x : y; }
DEVICE int64_t ceil_div(int64_t n, int64_t size) { return (n + size - 1) / size; }
DEVICE int64_t ceil_div(int64_t n, int size) { return (n + size - 1) / size; }
DEVICE int ceil_div(int n, int size) { return (n + size - 1) / size; }

// Return the sum of PARTIAL_SUMS numbers of a warp, number i in the lanes i and i + 16, as a tree:
// 0 + 8, 1 + 9, ...; then 0 + 4, ... All lanes get it.
template <class T> DEVICE T tree_sum(T x)
{
    UNROLLED for (int half = PARTIAL_SUMS / 2; half; half /= 2)
        x += exchange(x, half);
    return x;
}

// Return the mean of a row x (C) and 1 / its deviation. All lanes of a warp call this.
DEVICE float2 row_statistics(const float *x, int C, float epsilon)
{
    int lane = threadIdx.x % WARP;
    float sum = 0, squares = 0;
    _Pragma("unroll 16") for (int c = lane % PARTIAL_SUMS; c < C; c += PARTIAL_SUMS)
        sum += x[c];
    float mean = tree_sum(sum) / (float)C;
    _Pragma("unroll 16") for (int c = lane % PARTIAL_SUMS; c < C; c += PARTIAL_SUMS) {
        float difference = x[c] - mean;
        squares = multiply_add(difference, difference, squares);
    }
    float per_deviation = 1.0f / sqrtf(tree_sum(squares) / (float)C + epsilon);
    return make_float2(mean, per_deviation);
}

// Return the larger number; x if they cannot be compared.
DEVICE float larger_of(float x, float y) { return y > x ? y : x; }

// Return the largest number of a warp to all lanes. NaN counts as the smallest.
DEVICE float warp_largest(float x)
{
    UNROLLED for (int lanes = WARP / 2; lanes; lanes /= 2)
        x = larger_of(x, exchange(x, lanes));
    return x;
}

// Return the polynomial of n coefficients, that of the highest power first (Horner's scheme).
template <int n> DEVICE float polynomial(float x, const float (&coefficients)[n])
{
    float sum = coefficients[0];
    UNROLLED for (int i = 1; i < n; i++)
        sum = multiply_add(sum, x, coefficients[i]);
    return sum;
}

// Return e^x to within one ulp; 0 below -87, e^88 above 88.
DEVICE float exp_of(float x)
{
    const float taylor[] = EXP_TAYLOR;
    bool tiny = x < EXP_LOWEST;
    x = tiny ? EXP_LOWEST : x; // no branch: the result becomes 0 at last
    x = x > EXP_HIGHEST ? EXP_HIGHEST : x;
    float shifted = multiply_add(x, EXP_PER_LN2, ROUNDER);
    float n = shifted - ROUNDER;
    int32_t exponent = bits_of(shifted) - bits_of(ROUNDER);
    float f = multiply_add(n, EXP_MINUS_LN2_HIGH, x);
    f = multiply_add(n, EXP_MINUS_LN2_LOW, f);
    float power = float_of((int32_t)((uint32_t)(exponent + 127) << 23));
    return polynomial(f, taylor) * (tiny ? 0.0f : power);
}

DEVICE float absolute(float x) { return float_of(bits_of(x) & 0x7fffffff); }

DEVICE float tanh_of(float x)
{
    const float coefficients[] = TANH_SERIES;
    float size = absolute(x), square = x * x, e = exp_of(size * -2.0f);
    float large = (1.0f - e) / (1.0f + e);
    large = float_of(bits_of(large) | (bits_of(x) & (int32_t)0x80000000));
    float small = multiply_add(polynomial(square, coefficients) * square, x, x);
    return size < TANH_SMALL ? small : large;
}

DEVICE float gelu_new(float x)
{
    float u = GELU_NEW_FACTOR * multiply_add(GELU_NEW_CUBE * x * x, x, x);
    return x / (1.0f + exp_of(-2.0f * u));
}

DEVICE float gelu(float x)
{
    const float coefficients[] = ERFC_SERIES;
    float z = x * MINUS_SQRT_HALF, size = absolute(z);
    float t = 1.0f / multiply_add(size, 0.5f, 1.0f);
    float tail = t * exp_of(multiply_add(-size, size, polynomial(t, coefficients)));
    return 0.5f * x * (z >= 0.0f ? tail : 2.0f - tail);
}

DEVICE float silu(float x) { return x / (1.0f + exp_of(-x)); }

DEVICE float relu(float x) { return x < 0.0f ? 0.0f : x; }

DEVICE float activate(float x, int activation)
{
    switch (activation) {
    case GELU_NEW: return gelu_new(x);
    case GELU: return gelu(x);
    case RELU: return relu(x);
    case SILU: return silu(x);
    case TANH: return tanh_of(x);
    default: return x;
    }
}

// Return the natural logarithm of a finite x >= 1: its exponent, plus the atanh series of the rest.
DEVICE double logarithm(double x)
{
    int64_t bits = bits_of(x), exponent = (bits >> 52) - 1023;
    x = double_of(bits - (exponent << 52)); // now 1 <= x < 2
    if (x > SQRT_TWO) {
        x *= 0.5;
        exponent++;
    }
    double ratio = (x - 1) / (x + 1), square = ratio * ratio, series = 0;
    for (int n = LOGARITHM_TERMS; n > 0; n -= 2)
        series = series * square + 1.0 / n;
    return (double)exponent * LN2 + 2 * ratio * series;
}
