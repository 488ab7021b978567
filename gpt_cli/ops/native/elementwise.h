/* Elementwise functions of vectors, with the same bits on every processor. */
#ifndef GPT_CLI_ELEMENTWISE_H
#define GPT_CLI_ELEMENTWISE_H

#include <math.h>

#include "kernels.h"
#include "simd.h"

/* Return the polynomial of n coefficients, that of the highest power first (Horner's scheme). */
INLINE vf polynomial(vf x, const float *coefficients, int n)
{
    vf sum = broadcast(coefficients[0]);
    UNROLLED for (int i = 1; i < n; i++)
        sum = multiply_add(sum, x, broadcast(coefficients[i]));
    return sum;
}

/* Adding it rounds a float to an integer. */
INLINE vf rounder(void) { return broadcast(ROUNDER); }

/* Return e^x to within one ulp; 0 below -87, e^88 above 88.
 *
 * e^x = 2^n e^f with an integer n and |f| <= ln(2)/2, where a short Taylor series suffices. */
INLINE vf exp_vector(vf x)
{
    static const float taylor[] = EXP_TAYLOR;
    vi tiny = x < EXP_LOWEST;
    x = blend(tiny, broadcast(0.0f), x);
    x = blend(x > EXP_HIGHEST, broadcast(EXP_HIGHEST), x);
    vf shifted = multiply_add(x, broadcast(EXP_PER_LN2), rounder());
    vf n = shifted - rounder();
    vi exponent = (vi)shifted - (vi)rounder();
    vf f = multiply_add(n, broadcast(EXP_MINUS_LN2_HIGH), x);
    f = multiply_add(n, broadcast(EXP_MINUS_LN2_LOW), f);
    vf power = (vf)((vi)((vu)(exponent + 127) << 23));
    return blend(tiny, broadcast(0.0f), polynomial(f, taylor, 8) * power);
}

INLINE vf absolute(vf x) { return (vf)((vi)x & 0x7fffffff); }

/* (1 - e^-2|x|) / (1 + e^-2|x|) with the sign of x; a series near 0, where the difference cancels. */
INLINE vf tanh_vector(vf x)
{
    static const float coefficients[] = TANH_SERIES;
    vf size = absolute(x), square = x * x, e = exp_vector(size * -2.0f);
    vf large = (1.0f - e) / (1.0f + e);
    large = (vf)((vi)large | ((vi)x & (int32_t)0x80000000));
    vf small = multiply_add(polynomial(square, coefficients, 5) * square, x, x);
    return blend(size < TANH_SMALL, small, large);
}

/* x/2 (1 + tanh(u)) with u = sqrt(2/pi) (x + 0.044715 x^3), by tanh(u) = 2/(1 + e^-2u) - 1. */
INLINE vf gelu_new(vf x)
{
    vf u = GELU_NEW_FACTOR * multiply_add(GELU_NEW_CUBE * x * x, x, x);
    return x / (1.0f + exp_vector(-2.0f * u));
}

/* x times the standard normal CDF of x, by the erfc series of numpy_ops.erfc. */
INLINE vf gelu(vf x)
{
    static const float coefficients[] = ERFC_SERIES;
    vf z = x * MINUS_SQRT_HALF, size = absolute(z);
    vf t = 1.0f / multiply_add(size, broadcast(0.5f), broadcast(1.0f));
    vf tail = t * exp_vector(multiply_add(-size, size, polynomial(t, coefficients, 10)));
    return 0.5f * x * blend(z >= 0.0f, tail, 2.0f - tail);
}

INLINE vf silu(vf x) { return x / (1.0f + exp_vector(-x)); }

INLINE vf relu(vf x) { return blend(x < 0.0f, broadcast(0.0f), x); }

INLINE vf activate(vf x, int activation)
{
    switch (activation) {
    case GELU_NEW: return gelu_new(x);
    case GELU: return gelu(x);
    case RELU: return relu(x);
    case SILU: return silu(x);
    case TANH: return tanh_vector(x);
    default: return x;
    }
}

INLINE float largest_lane(vf x)
{
    float most = x[0];
    for (int lane = 1; lane < LANES; lane++)
        most = x[lane] > most ? x[lane] : most;
    return most;
}

/* Return the largest of n numbers. */
INLINE float largest_of(const float *x, int64_t n)
{
    vf largest = broadcast(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vf numbers = load(x + i);
        largest = blend(numbers > largest, numbers, largest);
    }
    float most = largest_lane(largest);
    for (; i < n; i++)
        most = x[i] > most ? x[i] : most;
    return most;
}

#endif
