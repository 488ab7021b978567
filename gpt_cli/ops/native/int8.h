/* Rounding to integers: rows of x for products with int8 weights, and weights themselves. */
#ifndef GPT_CLI_INT8_H
#define GPT_CLI_INT8_H

#include <float.h>
#include <math.h>

#include "elementwise.h"
#include "kernels.h"
#include "products.h"
#include "simd.h"

/* Store LANES integers from -32639 to 32639: `first` is the index of the first one in the group. */
INLINE void store_integers(struct digits *to, int first, vi integers)
{
#if HAS_DOT4
    vi low = ((integers + 128) & 255) - 128;
    vq low_bytes = __builtin_convertvector(low, vq);
    vq high_bytes = __builtin_convertvector((integers - low) >> 8, vq);
    memcpy(to->low + first, &low_bytes, sizeof low_bytes);
    memcpy(to->high + first, &high_bytes, sizeof high_bytes);
#else
    vl fours = (vl)__builtin_convertvector(integers, vn);
    const uint64_t outer = 0xFFFF00000000FFFF, second = 0xFFFF0000; /* of four */
    fours = (fours & outer) | (fours & second) << 16 | (fours >> 16 & second);
    memcpy(to->pairs + first, &fours, sizeof fours);
#endif
}

/* Round a row of x (n) to integers from -32639 to 32639, times a step, and return the step. It is
 * infinite or NaN if an element of the row is. */
static float round_row(const float *x, int64_t n, struct digits *digits)
{
    const float most = LARGEST_ACTIVATION, least = SMALLEST_SIZE;
    vi largest = {0}; /* bits of |x|, which compare as the floats do, and keep NaN */
    for (int64_t i = 0; i < n; i += LANES) {
        vi size = (vi)absolute(load_some(x + i, n - i));
        vi larger = size > largest;
        largest = (larger & size) | (~larger & largest);
    }
    int32_t bits = 0;
    for (int lane = 0; lane < LANES; lane++)
        bits = largest[lane] > bits ? largest[lane] : bits;
    float size;
    memcpy(&size, &bits, sizeof size);
    if (!(size < INFINITY)) { /* 0 times this step is NaN, and so are the results */
        memset(digits, 0, ceil_div(n, GROUP) * sizeof *digits);
        return size;
    }
    vf per_step = broadcast(most / (size < least ? least : size));
    for (int64_t group = 0; group < ceil_div(n, GROUP); group++) {
        struct digits *to = digits + group;
        vi sums = {0};
        for (int i = 0; i < GROUP; i += LANES) {
            int64_t at = group * GROUP + i;
            vf number = at < n ? load_some(x + at, n - at) : (vf){0};
            vi whole = (vi)multiply_add(number, per_step, rounder()) - (vi)rounder();
            sums += whole;
            store_integers(to, i, whole);
        }
        to->sum = 0;
        for (int lane = 0; lane < LANES; lane++)
            to->sum += sums[lane];
    }
    return size / most;
}

/* Quantize GROUP rows of a panel, or the last `rows`: see `quantize` in ops/int8.py. */
INLINE void quantize_group(
    enum format format, const void *w, int64_t first, int64_t rows, struct int8_group *to)
{
    for (int column = 0; column < COLUMNS; column += LANES) {
        vf largest = {0};
        for (int64_t k = 0; k < rows; k++) {
            vf size = absolute(weights_at(w, first + k * COLUMNS + column, format));
            largest = blend(size > largest, size, largest);
        }
        /* Rounded up to bfloat16, so that no quotient exceeds 127. */
        vu bits = ((vu)(largest / broadcast(127.0f)) + 0xFFFF) & 0xFFFF0000;
        vh scale = __builtin_convertvector(bits >> 16, vh);
        vf divisor = (vf)bits, least = broadcast(FLT_MIN);
        divisor = blend(divisor > least, divisor, least);
        store_short(to->scales + column, scale);
        for (int64_t k = 0; k < GROUP; k += 4) {
            vi four = {0};
            for (int i = 0; i < 4 && k + i < rows; i++) {
                vf weight = weights_at(w, first + (k + i) * COLUMNS + column, format);
                vi whole = (vi)(weight / divisor + rounder()) - (vi)rounder();
                four |= (whole & 255) << 8 * i;
            }
            memcpy(to->weights[k / 4][column], &four, sizeof four);
        }
    }
}

#endif
