/* What the kernels of all processor levels share: layouts, jobs, and the table of a level.
 *
 * Shapes: B batch, T new tokens, S = past + T, H heads, D head size, C width. Strides are counted in
 * numbers, not in bytes. A matrix (n_in, n_out) is stored as panels of COLUMNS columns. In a
 * panel, rows are contiguous and in order, so computing some outputs reads one contiguous stretch of
 * memory.
 */
#ifndef GPT_CLI_KERNELS_H
#define GPT_CLI_KERNELS_H

#include <stdint.h>

enum {
    COLUMNS = 32,       /* of a panel */
    BLOCK = 64,         /* int8 weights of a column that share a scale */
    PARTIAL_SUMS = 16,  /* of a sum over a row: number i is added to partial sum i mod 16 */
    MOST_ROWS = 12,     /* of a tile */
    MOST_PARTS = 2048,  /* of the panels of a matrix */
};

enum format { FLOAT32, BFLOAT16, FLOAT16, INT8 };

enum activation { NONE, GELU_NEW, GELU, RELU, SILU, TANH };

/* BLOCK rows of a panel in int8. Four weights of one column lie side by side, for `dot4`. */
struct int8_block {
    int8_t weights[BLOCK / 4][COLUMNS][4];
    uint16_t scales[COLUMNS]; /* bfloat16 */
};

/* A matrix (n_in, n_out). */
struct matrix {
    const void *panels; /* (panels, n_in, COLUMNS) of the format; INT8: (panels, blocks) int8_block */
    int64_t n_in, n_out;
    int32_t format;
};

/* A job is what one call computes. Threads take its parts, in any order. `slot` numbers the threads
 * that work on it, so that each has scratch memory of its own. */

struct linear {
    const struct matrix *w;
    const float *bias; /* (n_out,), or NULL */
    const float *x;    /* (rows, n_in) */
    float *y;       /* (rows, n_out in whole panels) */
    int64_t rows, x_stride, y_stride;
    int64_t starts[MOST_PARTS + 1]; /* the first panel of each part; then, how many there are */
    int64_t row_parts;
    int32_t activation;
    /* INT8: x rounded to 16 bits, (rows, blocks) and (rows,), as `round_rows` leaves it. */
    struct digits *digits;
    float *steps;
};

/* BLOCK numbers of x, rounded: 256 * high + low. */
struct digits {
    int8_t high[BLOCK], low[BLOCK];
    int32_t sum; /* of the rounded numbers */
    int32_t unused[15]; /* 64 bytes in all: high and low begin on a cache line */
};

struct layer_norm {
    const float *x, *weight, *bias;
    float *y;
    int64_t rows, x_stride, y_stride, C, rows_per_part;
    float epsilon;
};

struct add {
    const float *x, *y;
    float *sum;
    int64_t rows, x_stride, y_stride, sum_stride, C, rows_per_part;
};

struct embed {
    const struct matrix *wte; /* (C, V) */
    const float *wpe;         /* (n_positions, C) */
    const int64_t *ids, *positions;
    float *x;
    int64_t tokens, tokens_per_part;
};

/* Keys lie in panels, as the columns of a matrix (D, S): scores are a product. Values lie as the
 * rows of a matrix (S, width), with D filled up to `width`, whole panels: so are the results. */
struct store {
    const float *k, *v; /* (B, H, T, D) of these strides; numbers of a head lie side by side */
    int64_t b_stride, h_stride, t_stride;
    void *keys;   /* (B, H, blocks, D, COLUMNS) float or float16 */
    void *values; /* (B, H, blocks, COLUMNS, width) */
    const int64_t *past, *lengths; /* (B,) tokens before, and new ones of this row: at most T */
    int64_t B, H, D, blocks;
    int32_t half;
};

struct attend {
    const float *q; /* (B, H, T, D) of these strides */
    int64_t b_stride, h_stride, t_stride;
    const void *keys, *values; /* as `store` has them */
    const int64_t *visible;    /* (B, T) how many keys each query sees, from the first on */
    float *y;                  /* (B, T, H * D), rows y_stride apart */
    float *scratch;            /* for each slot, min(T, MOST_ROWS) rows of scratch_stride */
    int64_t y_stride, scratch_stride;
    int64_t B, H, T, D, blocks, tiles; /* tiles of MOST_ROWS queries of one head */
    float scale;
    int32_t half;
};

/* log(sum(exp(x))) of each row, in float64. */
struct log_sum_exp {
    const float *x;
    double *y;
    int64_t rows, stride, n;
};

struct exponentials {
    const float *x;
    float *y;
    int64_t n, n_per_part;
};

typedef void part_function(const void *job, int64_t part, int slot);

/* What a level computes: functions of one part of a job each. */
struct kernels {
    const char *level;
    part_function *embed, *layer_norm, *linear, *round_rows, *add, *store, *attend, *log_sum_exp,
        *exponentials;
};

#endif
