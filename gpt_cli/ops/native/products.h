/* Products of rows with a panel of a matrix, in float and with int8 weights. */
#ifndef GPT_CLI_PRODUCTS_H
#define GPT_CLI_PRODUCTS_H

#include <stddef.h>

#include "elementwise.h"
#include "kernels.h"
#include "simd.h"

enum {
    PREFETCH = 8192, /* bytes ahead */
    VECTORS = COLUMNS / LANES, /* in a row of a panel */
    CHUNKS = PARTIAL_SUMS / LANES, /* vectors that hold the partial sums */
#if LANES == 8
    REGISTERS = 12, /* of 16, for the sums of a tile */
    TILE_ROWS = 6,
    INT8_REGISTERS = 4,
    INT8_TILE_ROWS = 2,
#elif LANES == 16
    REGISTERS = 24, /* of 32 */
    TILE_ROWS = MAX_TILE_ROWS,
    INT8_REGISTERS = 8,
    INT8_TILE_ROWS = 4,
#else
    REGISTERS = 24,
    TILE_ROWS = 6,
    INT8_REGISTERS = 8,
    INT8_TILE_ROWS = 2,
#endif
};

#define UNROLLED _Pragma("GCC unroll 16")

/* Load the first LANES of n floats, with zeros in the lanes from n on. */
INLINE vf load_some(const float *from, int64_t n)
{
    if (n >= LANES)
        return load(from);
    vf x = {0};
    memcpy(&x, from, sizeof(float) * n);
    return x;
}

INLINE void store_some(float *to, vf x, int64_t n)
{
    if (n >= LANES)
        store(to, x);
    else
        memcpy(to, &x, sizeof(float) * n);
}

/* --- products of floats ------------------------------------------------------------------------ */

/* Return LANES weights from index `place` on, widened to float. */
INLINE vf weights_at(const void *w, int64_t place, enum format format)
{
    if (format == FLOAT32)
        return load((const float *)w + place);
    vh bits = load_short((const uint16_t *)w + place);
    return format == BFLOAT16 ? widen_bfloat16(bits) : widen_float16(bits);
}

/* Fetch the weights PREFETCH bytes after index `place` to the second-level cache. */
INLINE void prefetch(const void *w, int64_t place, enum format format)
{
    __builtin_prefetch((const char *)w + place * bytes_of(format) + PREFETCH, 0, 2);
}

/* y (R, V vectors) = bias + x (R, K) @ w (K, V vectors, rows w_stride apart). Each element of y is one
 * chain of fused multiply-adds along K, so its bits do not depend on R and V. The sums stay in
 * registers. With several rows, computing hides too few loads for the processor's own prefetching: 12
 * rows of all weights of 124M take 18.3 ms, and without this prefetching to the second-level cache
 * 20.9 ms. */
INLINE void multiply_tile(
    enum format format, int R, int V, const float *x, int64_t x_stride, const void *w, int64_t w_at,
    int64_t w_stride, int64_t K, const float *bias, float *y, int64_t y_stride)
{
    vf sums[TILE_ROWS][VECTORS];
    UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int v = 0; v < V; v++)
            sums[r][v] = bias ? load(bias + v * LANES) : (vf){0};
    for (int64_t k = 0; k < K; k++) {
        vf weights[VECTORS];
        if (R > 1)
            UNROLLED for (int v = 0; v < V; v++)
                prefetch(w, w_at + k * w_stride + v * LANES, format);
        UNROLLED for (int v = 0; v < V; v++)
            weights[v] = weights_at(w, w_at + k * w_stride + v * LANES, format);
        UNROLLED for (int r = 0; r < R; r++)
            UNROLLED for (int v = 0; v < V; v++)
                sums[r][v] = multiply_add(broadcast(x[r * x_stride + k]), weights[v], sums[r][v]);
    }
    UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int v = 0; v < V; v++)
            store(y + r * y_stride + v * LANES, sums[r][v]);
}

/* As above for a whole panel, in two halves if its sums do not fit in the registers. */
INLINE void multiply_rows(
    enum format format, int R, const float *x, int64_t x_stride, const void *w, int64_t w_at,
    int64_t w_stride, int64_t K, const float *bias, float *y, int64_t y_stride)
{
    const int V = R * VECTORS <= REGISTERS ? VECTORS : VECTORS / 2;
    for (int column = 0; column < COLUMNS; column += V * LANES)
        multiply_tile(
            format, R, V, x, x_stride, w, w_at + column, w_stride, K, bias ? bias + column : NULL,
            y + column, y_stride);
}

INLINE void activate_rows(float *y, int64_t rows, int64_t y_stride, int activation)
{
    if (activation == NONE)
        return;
    for (int64_t r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) {
            float *at = y + r * y_stride + v * LANES;
            store(at, activate(load(at), activation));
        }
}

/* y (rows, COLUMNS) = activation(bias + x (rows, K) @ one panel w), tile by tile. */
INLINE void multiply_panel(
    enum format format, int64_t rows, const float *x, int64_t x_stride, const void *w, int64_t w_at,
    int64_t w_stride, int64_t K, const float *bias, int activation, float *y, int64_t y_stride)
{
    for (int64_t done = 0; done < rows; done += TILE_ROWS) {
        const float *from = x + done * x_stride;
        float *to = y + done * y_stride;
        int64_t count = smaller(rows - done, TILE_ROWS);
        switch (count) {
#define ROWS(R) \
    case R: \
        multiply_rows(format, R, from, x_stride, w, w_at, w_stride, K, bias, to, y_stride); \
        break;
            ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#if LANES == 16
            ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#endif
#undef ROWS
        }
        activate_rows(to, count, y_stride, activation);
    }
}

static void multiply(
    enum format format, int64_t rows, const float *x, int64_t x_stride, const void *w, int64_t w_at,
    int64_t w_stride, int64_t K, const float *bias, int activation, float *y, int64_t y_stride)
{
    switch (format) { /* with a constant format, the compiler specializes each call */
    case FLOAT32:
        multiply_panel(
            FLOAT32, rows, x, x_stride, w, w_at, w_stride, K, bias, activation, y, y_stride);
        break;
    case BFLOAT16:
        multiply_panel(
            BFLOAT16, rows, x, x_stride, w, w_at, w_stride, K, bias, activation, y, y_stride);
        break;
    default:
        multiply_panel(
            FLOAT16, rows, x, x_stride, w, w_at, w_stride, K, bias, activation, y, y_stride);
    }
}

/* y (2 panels) = x (K) @ two panels of w, `apart` elements from one to the next. A single row is bound
 * by the latency of the multiply-adds; two panels have twice as many independent sums. */
INLINE void multiply_pair_of(
    enum format format, const float *x, const void *w, int64_t w_at, int64_t w_stride, int64_t apart,
    int64_t K, float *y)
{
    vf sums[2][VECTORS] = {{{0}}};
    for (int64_t k = 0; k < K; k++) {
        vf number = broadcast(x[k]);
        UNROLLED for (int panel = 0; panel < 2; panel++)
            UNROLLED for (int v = 0; v < VECTORS; v++) {
                int64_t place = w_at + panel * apart + k * w_stride + v * LANES;
                sums[panel][v] =
                    multiply_add(number, weights_at(w, place, format), sums[panel][v]);
            }
    }
    UNROLLED for (int panel = 0; panel < 2; panel++)
        UNROLLED for (int v = 0; v < VECTORS; v++)
            store(y + panel * COLUMNS + v * LANES, sums[panel][v]);
}

static void multiply_pair(
    enum format format, const float *x, const void *w, int64_t w_at, int64_t w_stride, int64_t apart,
    int64_t K, float *y)
{
    if (format == FLOAT32)
        multiply_pair_of(FLOAT32, x, w, w_at, w_stride, apart, K, y);
    else
        multiply_pair_of(FLOAT16, x, w, w_at, w_stride, apart, K, y);
}

/* --- products with int8 weights ---------------------------------------------------------------- */

/* y (R, V vectors) = bias + steps * (x (R, BLOCK * blocks), in digits, @ w (blocks, V vectors)).
 * The sum over a block is an integer, and exact. Blocks are added in order. */
INLINE void multiply_int8_tile(
    int R, int V, const struct digits *x, int64_t blocks, const float *steps,
    const struct int8_block *w, int column, const float *bias, float *y, int64_t y_stride)
{
    vf sums[INT8_TILE_ROWS][VECTORS];
    UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int v = 0; v < V; v++)
            sums[r][v] = (vf){0};
    for (int64_t block = 0; block < blocks; block++) {
        vi high[INT8_TILE_ROWS][VECTORS], low[INT8_TILE_ROWS][VECTORS];
        UNROLLED for (int r = 0; r < R; r++)
            UNROLLED for (int v = 0; v < V; v++)
                high[r][v] = low[r][v] = (vi){0};
        for (int four = 0; four < BLOCK / 4; four++) {
            vb weights[VECTORS];
            UNROLLED for (int v = 0; v < V; v++)
                weights[v] = load_bytes(w[block].weights[four][column + v * LANES]);
            UNROLLED for (int r = 0; r < R; r++) {
                const struct digits *row = x + r * blocks + block;
                vb upper = broadcast_group(row->high + 4 * four);
                vb lower = broadcast_group(row->low + 4 * four);
                UNROLLED for (int v = 0; v < V; v++) {
                    high[r][v] = dot4(high[r][v], weights[v], upper);
                    low[r][v] = dot4(low[r][v], weights[v], lower);
                }
            }
        }
        UNROLLED for (int v = 0; v < V; v++) {
            vf scales = widen_bfloat16(load_short(w[block].scales + column + v * LANES));
            UNROLLED for (int r = 0; r < R; r++) {
                vi sum = (high[r][v] << 8) + low[r][v] - BIAS * x[r * blocks + block].sum;
                sums[r][v] = multiply_add(to_float(sum), scales, sums[r][v]);
            }
        }
    }
    UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int v = 0; v < V; v++) {
            vf start = bias ? load(bias + v * LANES) : (vf){0};
            store(y + r * y_stride + v * LANES, multiply_add(sums[r][v], broadcast(steps[r]), start));
        }
}

INLINE void multiply_int8_rows(
    int R, const struct digits *x, int64_t blocks, const float *steps, const struct int8_block *w,
    const float *bias, float *y, int64_t y_stride)
{
    const int V = R * VECTORS <= INT8_REGISTERS ? VECTORS : VECTORS / 2;
    for (int column = 0; column < COLUMNS; column += V * LANES)
        multiply_int8_tile(
            R, V, x, blocks, steps, w, column, bias ? bias + column : NULL, y + column, y_stride);
}

/* y (rows, COLUMNS) = activation(bias + x @ one panel w), tile by tile. */
static void multiply_int8(
    int64_t rows, const struct digits *x, int64_t blocks, const float *steps,
    const struct int8_block *w, const float *bias, int activation, float *y, int64_t y_stride)
{
    for (int64_t done = 0; done < rows; done += INT8_TILE_ROWS) {
        const struct digits *from = x + done * blocks;
        float *to = y + done * y_stride;
        int64_t count = smaller(rows - done, INT8_TILE_ROWS);
        switch (count) {
        case 1: multiply_int8_rows(1, from, blocks, steps + done, w, bias, to, y_stride); break;
        case 2: multiply_int8_rows(2, from, blocks, steps + done, w, bias, to, y_stride); break;
#if LANES == 16
        case 3: multiply_int8_rows(3, from, blocks, steps + done, w, bias, to, y_stride); break;
        case 4: multiply_int8_rows(4, from, blocks, steps + done, w, bias, to, y_stride); break;
#endif
        }
        activate_rows(to, count, y_stride, activation);
    }
}

#endif
