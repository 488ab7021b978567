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
    WIDENED = 256, /* rows of a panel: 32 KB as floats */
    MAX_NARROW_ROWS = 48, /* of x: with more, weights are widened once for all tiles */
#if LANES == 8
    REGISTERS = 12, /* of 16, for the sums of a tile */
    TILE_ROWS = 6,
#elif LANES == 16
    REGISTERS = 24, /* of 32 */
    TILE_ROWS = MAX_TILE_ROWS,
#else
    REGISTERS = 24,
    TILE_ROWS = 6,
#endif
};

/* The rows of a tile with int8 weights, and the registers for its sums. With pairs and 16 registers,
 * some of 4 * 4 sums go to memory. Half of the columns at a time would be slower: 4 rows of all weights of
 * 124M take 15.5 ms so, and 9.5 ms with all columns. */
#if HAS_DOT4
#define INT8_TILE_ROWS (LANES == 16 ? 4 : 2)
#define INT8_REGISTERS (LANES == 8 ? 4 : 8)
#else
#define INT8_TILE_ROWS (LANES == 16 ? 12 : LANES == 8 ? 4 : 2)
#define INT8_REGISTERS (LANES == 16 ? 24 : LANES == 8 ? 16 : 8)
#endif

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

/* y (rows, COLUMNS) = activation(start + x (rows, K) @ w (K, COLUMNS)). */
struct product {
    const float *x, *start; /* start: (COLUMNS,) for all rows, or rows start_stride apart, or NULL */
    const void *w;
    float *y;
    int64_t rows, K, x_stride, start_stride, w_stride, y_stride;
    int activation;
};

/* Return LANES weights from `index` on, widened to float. */
INLINE vf weights_at(const void *w, int64_t index, enum format format)
{
    if (format == FLOAT32)
        return load((const float *)w + index);
    vh bits = load_short((const uint16_t *)w + index);
    return format == BFLOAT16 ? widen_bfloat16(bits) : widen_float16(bits);
}

/* Fetch the weights PREFETCH bytes after `index` to the second-level cache. */
INLINE void prefetch(const void *w, int64_t index, enum format format)
{
    __builtin_prefetch((const char *)w + index * storage_of[format].weight_bytes + PREFETCH, 0, 2);
}

/* Compute R rows and V vectors of a product, from `column` on, without its activation. An
 * element of y is one chain of fused multiply-adds along K, so its bits do not depend on R and V. The
 * sums stay in registers. With several rows, computing hides too few loads for the hardware's
 * prefetching: 12 rows of all weights of 124M take 18.3 ms, and without this prefetching to the
 * second-level cache 20.9 ms. */
INLINE void multiply_tile(
    enum format format, int R, int V, const struct product *p, int column)
{
    const float *x = p->x;
    const void *w = p->w;
    int64_t K = p->K, x_stride = p->x_stride, w_stride = p->w_stride;
    vf sums[TILE_ROWS][VECTORS];
    UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int v = 0; v < V; v++)
            sums[r][v] = p->start ? load(p->start + r * p->start_stride + column + v * LANES)
                                  : (vf){0};
    for (int64_t k = 0; k < K; k++) {
        vf weights[VECTORS];
        if (R > 1)
            UNROLLED for (int v = 0; v < V; v++)
                prefetch(w, k * w_stride + column + v * LANES, format);
        UNROLLED for (int v = 0; v < V; v++)
            weights[v] = weights_at(w, k * w_stride + column + v * LANES, format);
        UNROLLED for (int r = 0; r < R; r++)
            UNROLLED for (int v = 0; v < V; v++)
                sums[r][v] = multiply_add(broadcast(x[r * x_stride + k]), weights[v], sums[r][v]);
    }
    UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int v = 0; v < V; v++)
            store(p->y + r * p->y_stride + column + v * LANES, sums[r][v]);
}

/* As above for all columns, in two halves if their sums do not fit in the registers. */
INLINE void multiply_rows(enum format format, int R, const struct product *p)
{
    const int V = R * VECTORS <= REGISTERS ? VECTORS : VECTORS / 2;
    for (int column = 0; column < COLUMNS; column += V * LANES)
        multiply_tile(format, R, V, p, column);
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

/* Compute a product tile by tile. */
INLINE void multiply_panel(enum format format, struct product p)
{
    for (int64_t left = p.rows; left > 0; left -= TILE_ROWS) {
        int64_t count = smaller(left, TILE_ROWS);
        switch (count) {
        case 1: multiply_rows(format, 1, &p); break;
        case 2: multiply_rows(format, 2, &p); break;
        case 3: multiply_rows(format, 3, &p); break;
        case 4: multiply_rows(format, 4, &p); break;
        case 5: multiply_rows(format, 5, &p); break;
        case 6: multiply_rows(format, 6, &p); break;
#if LANES == 16
        case 7: multiply_rows(format, 7, &p); break;
        case 8: multiply_rows(format, 8, &p); break;
        case 9: multiply_rows(format, 9, &p); break;
        case 10: multiply_rows(format, 10, &p); break;
        case 11: multiply_rows(format, 11, &p); break;
        case 12: multiply_rows(format, 12, &p); break;
#endif
        }
        activate_rows(p.y, count, p.y_stride, p.activation);
        p.x += TILE_ROWS * p.x_stride;
        if (p.start)
            p.start += TILE_ROWS * p.start_stride;
        p.y += TILE_ROWS * p.y_stride;
    }
}

/* Compute a product with many rows: widen WIDENED rows of w at a time, once for all tiles. They stay in
 * the first-level cache. An element of y remains one chain along K, which is continued from y. */
static void multiply_widened(enum format format, const struct product *p)
{
    float widened[WIDENED * COLUMNS];
    struct product part = *p;
    part.w = widened, part.w_stride = COLUMNS, part.activation = NONE;
    for (int64_t k = 0; k < p->K; k += WIDENED) {
        part.K = smaller(p->K - k, WIDENED);
        for (int64_t i = 0; i < part.K; i++)
            for (int column = 0; column < COLUMNS; column += LANES)
                store(widened + i * COLUMNS + column,
                      weights_at(p->w, (k + i) * p->w_stride + column, format));
        if (k + WIDENED >= p->K)
            part.activation = p->activation;
        multiply_panel(FLOAT32, part);
        part.x += WIDENED;
        part.start = p->y, part.start_stride = p->y_stride;
    }
}

static void multiply(enum format format, const struct product *p)
{
    if (format != FLOAT32 && p->rows > MAX_NARROW_ROWS) {
        multiply_widened(format, p);
        return;
    }
    switch (format) { /* with a constant format, the compiler specializes the calls */
    case FLOAT32: multiply_panel(FLOAT32, *p); break;
    case BFLOAT16: multiply_panel(BFLOAT16, *p); break;
    default: multiply_panel(FLOAT16, *p);
    }
}

/* Compute one row of the products with two panels, the second `apart` elements after w, without start
 * and activation: y (2 * COLUMNS). A single row is bound by the latency of the multiply-adds; two panels
 * have twice as many independent sums. */
INLINE void multiply_pair_of(enum format format, const struct product *p, int64_t apart)
{
    vf sums[2][VECTORS] = {{{0}}};
    for (int64_t k = 0; k < p->K; k++) {
        vf number = broadcast(p->x[k]);
        UNROLLED for (int panel = 0; panel < 2; panel++)
            UNROLLED for (int v = 0; v < VECTORS; v++) {
                int64_t index = panel * apart + k * p->w_stride + v * LANES;
                sums[panel][v] =
                    multiply_add(number, weights_at(p->w, index, format), sums[panel][v]);
            }
    }
    UNROLLED for (int panel = 0; panel < 2; panel++)
        UNROLLED for (int v = 0; v < VECTORS; v++)
            store(p->y + panel * COLUMNS + v * LANES, sums[panel][v]);
}

static void multiply_pair(enum format format, const struct product *p, int64_t apart)
{
    if (format == FLOAT32)
        multiply_pair_of(FLOAT32, p, apart);
    else
        multiply_pair_of(FLOAT16, p, apart);
}

/* --- products with int8 weights ---------------------------------------------------------------- */

/* y (rows, COLUMNS) = activation(bias + steps * (x (rows, GROUP * groups), in digits, @ w)). */
struct int8_product {
    const struct digits *x; /* (rows, groups) */
    const float *steps;     /* (rows,) */
    const struct int8_group *w;
    const float *bias; /* (COLUMNS,) */
    float *y;
    int64_t rows, groups, y_stride;
    int activation;
};

/* Compute the sums over a group for R rows of x, `groups` apart, and V vectors from `column` on. They are
 * integers, and exact. */
INLINE void sum_group(
    int R, int V, const struct digits *x, int64_t groups, const struct int8_group *w, int column,
    vi sums[INT8_TILE_ROWS][VECTORS])
{
#if HAS_DOT4
    vi high[INT8_TILE_ROWS][VECTORS], low[INT8_TILE_ROWS][VECTORS];
    UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int v = 0; v < V; v++)
            high[r][v] = low[r][v] = (vi){0};
    for (int four = 0; four < GROUP / 4; four++) {
        vb weights[VECTORS];
        UNROLLED for (int v = 0; v < V; v++)
            weights[v] = load_bytes(w->weights[four][column + v * LANES]);
        UNROLLED for (int r = 0; r < R; r++) {
            vb upper = broadcast_four(x[r * groups].high + 4 * four);
            vb lower = broadcast_four(x[r * groups].low + 4 * four);
            UNROLLED for (int v = 0; v < V; v++) {
                high[r][v] = dot4(high[r][v], weights[v], upper);
                low[r][v] = dot4(low[r][v], weights[v], lower);
            }
        }
    }
    UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int v = 0; v < V; v++)
            sums[r][v] = (high[r][v] << 8) + low[r][v] - BIAS * x[r * groups].sum;
#else
    pair_sums pairs[INT8_TILE_ROWS][VECTORS];
    UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int v = 0; v < V; v++)
            pairs[r][v] = (pair_sums){0};
    for (int four = 0; four < GROUP / 4; four++) {
        vs even[VECTORS], odd[VECTORS];
        UNROLLED for (int v = 0; v < V; v++) {
            const int8_t *from = w->weights[four][column + v * LANES];
            if (R > 6) /* fewer rows are faster without */
                __builtin_prefetch(from + PREFETCH, 0, 2);
            even[v] = even_weights(load_bytes(from));
            odd[v] = odd_weights(load_bytes(from));
        }
        UNROLLED for (int r = 0; r < R; r++) {
            vs x_even = broadcast_pair(x[r * groups].pairs + 4 * four);
            vs x_odd = broadcast_pair(x[r * groups].pairs + 4 * four + 2);
            UNROLLED for (int v = 0; v < V; v++) {
                pairs[r][v] = add_pairs(pairs[r][v], even[v], x_even);
                pairs[r][v] = add_pairs(pairs[r][v], odd[v], x_odd);
            }
        }
    }
    UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int v = 0; v < V; v++)
            sums[r][v] = sum_of_pairs(pairs[r][v]);
#endif
}

/* Compute R rows and V vectors of a product. Groups are added in order. */
INLINE void multiply_int8_tile(
    int R, int V, const struct int8_product *p, int64_t first_row, int column)
{
    int64_t groups = p->groups;
    vf sums[INT8_TILE_ROWS][VECTORS];
    UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int v = 0; v < V; v++)
            sums[r][v] = (vf){0};
    for (int64_t group = 0; group < groups; group++) {
        const struct int8_group *w = p->w + group;
        vi whole[INT8_TILE_ROWS][VECTORS];
        sum_group(R, V, p->x + first_row * groups + group, groups, w, column, whole);
        UNROLLED for (int v = 0; v < V; v++) {
            vf scales = widen_bfloat16(load_short(w->scales + column + v * LANES));
            UNROLLED for (int r = 0; r < R; r++)
                sums[r][v] = multiply_add(to_float(whole[r][v]), scales, sums[r][v]);
        }
    }
    UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int v = 0; v < V; v++) {
            vf step = broadcast(p->steps[first_row + r]), bias = load(p->bias + column + v * LANES);
            float *y = p->y + (first_row + r) * p->y_stride + column + v * LANES;
            store(y, multiply_add(sums[r][v], step, bias));
        }
}

INLINE void multiply_int8_rows(int R, const struct int8_product *p, int64_t row)
{
    const int V = R * VECTORS <= INT8_REGISTERS ? VECTORS : VECTORS / 2;
    for (int column = 0; column < COLUMNS; column += V * LANES)
        multiply_int8_tile(R, V, p, row, column);
}

/* Compute a product tile by tile. */
static void multiply_int8(const struct int8_product *p)
{
    for (int64_t row = 0; row < p->rows; row += INT8_TILE_ROWS) {
        int64_t count = smaller(p->rows - row, INT8_TILE_ROWS);
        switch (count) {
        case 1: multiply_int8_rows(1, p, row); break;
        case 2: multiply_int8_rows(2, p, row); break;
#if INT8_TILE_ROWS > 2
        case 3: multiply_int8_rows(3, p, row); break;
        case 4: multiply_int8_rows(4, p, row); break;
#endif
#if INT8_TILE_ROWS > 4
        case 5: multiply_int8_rows(5, p, row); break;
        case 6: multiply_int8_rows(6, p, row); break;
        case 7: multiply_int8_rows(7, p, row); break;
        case 8: multiply_int8_rows(8, p, row); break;
        case 9: multiply_int8_rows(9, p, row); break;
        case 10: multiply_int8_rows(10, p, row); break;
        case 11: multiply_int8_rows(11, p, row); break;
        case 12: multiply_int8_rows(12, p, row); break;
#endif
        }
        activate_rows(p->y + row * p->y_stride, count, p->y_stride, p->activation);
    }
}

#endif
