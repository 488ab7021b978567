/* Layouts, jobs and the function table that the kernels of all processor levels share.
 *
 * Shapes: B batch, T new tokens, S = past + T, H heads, D head size, C width. Strides count elements,
 * not bytes. A matrix (n_in, n_out) is stored as panels of COLUMNS columns. A panel is row-major, so
 * a range of outputs reads one contiguous range of memory.
 */
#ifndef GPT_CLI_KERNELS_H
#define GPT_CLI_KERNELS_H

#include <stdint.h>

enum {
    COLUMNS = 32,       /* of a panel */
    BLOCK = 64,         /* consecutive int8 weights of a column that share a scale */
    PARTIAL_SUMS = 16,  /* of a sum over a row: element i is added to partial sum i mod 16 */
    MAX_TILE_ROWS = 12, /* at any level; see TILE_ROWS in products.h */
    ONE = 1 << 30,      /* count of a token of weight 1: see `struct cumulate` */
    MAX_PARTS = 2048,   /* that a job cuts the panels of a matrix into */
};

enum format { FLOAT32, BFLOAT16, FLOAT16, INT8 };

enum activation { NONE, GELU_NEW, GELU, RELU, SILU, TANH };

#define INLINE static inline __attribute__((always_inline))

INLINE int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }
INLINE int64_t larger(int64_t x, int64_t y) { return x > y ? x : y; }
INLINE int64_t ceil_div(int64_t n, int64_t size) { return (n + size - 1) / size; }

/* Return the bytes of one weight, without its scale. */
INLINE int64_t bytes_of(int format)
{
    return format == FLOAT32 ? 4 : format == INT8 ? 1 : 2;
}

/* BLOCK rows of an int8 panel. Four weights of one column are adjacent, as `dot4` reads them. */
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

/* A job describes one operation. Threads run its parts in any order. `slot` is the index of the
 * thread that runs a part: each slot has its own scratch memory. */

struct linear {
    const struct matrix *w;
    const float *bias; /* (n_out,), or NULL */
    const float *x;    /* (rows, n_in) */
    float *y;          /* (rows, n_out padded to whole panels) */
    int64_t rows, x_stride, y_stride;
    int64_t starts[MAX_PARTS + 1]; /* the first panel of each part, then the number of panels */
    int64_t row_parts;             /* row ranges, each of which is a part of its own */
    int32_t activation;
    /* INT8: x rounded to 16 bits by `round_rows`: digits (rows, blocks) and steps (rows,). */
    struct digits *digits;
    float *steps;
};

/* BLOCK elements of x, rounded to integers 256 * high + low. */
struct digits {
    int8_t high[BLOCK], low[BLOCK];
    int32_t sum;        /* of the integers */
    int32_t unused[15]; /* padding, so that high and low start on a cache line */
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

/* Keys are stored in panels, as the columns of a matrix (D, S), so that scores are a product. Values
 * are stored as the rows of a matrix (S, width), where `width` is D padded to whole panels. */
struct store {
    const float *k, *v; /* (B, H, T, D) with these strides; the last axis is contiguous */
    int64_t b_stride, h_stride, t_stride;
    void *keys;   /* (B, H, blocks, D, COLUMNS) float or float16 */
    void *values; /* (B, H, blocks, COLUMNS, width) */
    const int64_t *past, *lengths; /* (B,) cached tokens, and new tokens of this row: at most T */
    int64_t B, H, D, blocks;
    int32_t half; /* the cache is float16 */
};

/* Convert runs of n numbers to float16: the blocks of each head of a cache, in one of float16. */
struct narrow {
    const float *x; /* (rows, n), rows `stride` apart; n is a multiple of COLUMNS */
    uint16_t *y;    /* the same */
    int64_t stride, n;
};

struct attend {
    const float *q; /* (B, H, T, D) with these strides */
    int64_t b_stride, h_stride, t_stride;
    const void *keys, *values; /* as in `struct store` */
    const int64_t *visible;    /* (B, T) number of keys that each query sees, from key 0 */
    float *y;                  /* (B, T, H * D), rows y_stride apart */
    float *scratch;            /* (slots, min(T, MAX_TILE_ROWS), scratch_stride) scores */
    int64_t y_stride, scratch_stride;
    int64_t B, H, T, D, blocks, tiles; /* tiles of MAX_TILE_ROWS queries per head */
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

/* Running sums of the counts of each row of logits, `ONE` for the likeliest token. */
struct cumulate {
    const float *logits; /* (rows, n) */
    int64_t *sums;       /* (rows, n) */
    int64_t stride, n;
};

/* The choice of a token from each row of logits: see sampling.h. */
struct choose {
    const float *logits;    /* (rows, n) */
    const double *uniforms; /* (rows,) in [0, 1) */
    int64_t *ids;           /* (rows,) */
    float *scratch;         /* (slots, 4 n) */
    int64_t stride, n, top_k; /* 1 <= top_k <= n */
    double top_p;
    float temperature, log_min_p; /* -INFINITY if there is no min_p */
};

/* Convert a matrix to INT8: panel by panel, so that both have the same panels. */
struct quantize {
    const struct matrix *w; /* FLOAT32, BFLOAT16 or FLOAT16 */
    struct int8_block *panels;
};

typedef void part_function(const void *job, int64_t part, int slot);

/* The functions of one level. Each computes one part of a job. */
struct kernels {
    const char *level;
    part_function *embed, *layer_norm, *linear, *round_rows, *add, *store, *narrow, *attend,
        *log_sum_exp, *exponentials, *quantize, *choose, *cumulate;
};

#endif
