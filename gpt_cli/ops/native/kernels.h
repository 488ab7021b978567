/* Layouts, the structs of the operations, and the function table of a processor level.
 *
 * Shapes: B batch, T new tokens, S = past + T, H heads, D head size, C width. Strides count elements,
 * not bytes, unless their name says so.
 *
 * A matrix (n_in, n_out) is stored as panels of COLUMNS columns. A panel is row-major, so a range of
 * outputs reads one contiguous range of memory. These are the positions in memory:
 *
 *            panel 0: columns 0 to 31     panel 1: columns 32 to 63
 *     row 0    |  0   1   2 ..  31 |        | n_in * 32 ..         |
 *     row 1    | 32  33  34 ..  63 |        | (n_in + 1) * 32 ..   |   ...
 *     ...      |                   |        |                      |
 *
 * The last panel is padded with zeros. An INT8 panel is a sequence of groups of GROUP rows. The last
 * group is padded with zeros. A group of 2112 bytes, where `r5` is the weight of row 5:
 *
 *                 column 0        column 1            column 31
 *     line 0    | r0 r1 r2 r3   | r0 r1 r2 r3   | ... | r0 r1 r2 r3   |   4 * 32 weights
 *     line 1    | r4 r5 r6 r7   | r4 r5 r6 r7   | ... | r4 r5 r6 r7   |
 *     ...
 *     line 15   | r60 .. r63    | r60 .. r63    | ... | r60 .. r63    |
 *     scales    | of column 0 | of column 1 | ... | of column 31 |        32 scales of 2 bytes
 */
#ifndef GPT_CLI_KERNELS_H
#define GPT_CLI_KERNELS_H

#include <stdint.h>

#include "../constants.inc"

enum {
    COLUMNS = 32,       /* of a panel */
    MAX_TILE_ROWS = 12, /* at any level; see TILE_ROWS in products.h */
    ROW_PADDING = 16,   /* floats: rows a power of two apart would compete for few sets of the cache */
    ROWS_PER_PART = 16, /* of an operation on single rows */
    NUMBERS_PER_PART = 4096, /* of `struct exp` and `struct activate` */
    MAX_PARTS = 2048,        /* that the panels of a matrix are cut into */
};

enum format { FLOAT32, BFLOAT16, FLOAT16, INT8, FORMATS };

enum known_step { NOTHING, SCORES, PATTERN }; /* of `struct attend` */

enum activation { NONE, GELU_NEW, GELU, RELU, SILU, TANH };

#define INLINE static inline __attribute__((always_inline))

INLINE int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }
INLINE int64_t larger(int64_t x, int64_t y) { return x > y ? x : y; }
INLINE int64_t ceil_div(int64_t n, int64_t size) { return (n + size - 1) / size; }

/* Return n columns padded to whole panels. */
INLINE int64_t padded(int64_t n) { return ceil_div(n, COLUMNS) * COLUMNS; }

/* GROUP rows of an INT8 panel. Four weights of one column are adjacent: see simd.h. */
struct int8_group {
    int8_t weights[GROUP / 4][COLUMNS][4];
    uint16_t scales[COLUMNS]; /* bfloat16 */
};

/* How a format is stored: the bytes of a weight, and the rows and bytes of a unit of a panel. */
struct storage {
    const char *name;
    int64_t weight_bytes, unit_rows, unit_bytes;
};

static const struct storage storage_of[FORMATS] = {
    [FLOAT32] = {"float32", 4, 1, 4 * COLUMNS},
    [BFLOAT16] = {"bfloat16", 2, 1, 2 * COLUMNS},
    [FLOAT16] = {"float16", 2, 1, 2 * COLUMNS},
    [INT8] = {"int8", 1, GROUP, sizeof(struct int8_group)},
};

/* A matrix (n_in, n_out). */
struct matrix {
    void *panels;
    int64_t n_in, n_out;
    int64_t panel_bytes; /* from one panel to the next */
    int32_t format;
};

INLINE char *panel_of(const struct matrix *w, int64_t panel)
{
    return (char *)w->panels + panel * w->panel_bytes;
}

/* GROUP elements of x, rounded to integers: as two digits, 256 * high + low, or whole, if the level
 * has no `dot4`. Of four whole ones x0 x1 x2 x3, the order is x0 x2 x1 x3, as `add_pairs` reads them. */
struct digits {
    union {
        struct {
            int8_t high[GROUP], low[GROUP];
        };
        int16_t pairs[GROUP];
    };
    int32_t sum;        /* of the integers */
    int32_t unused[15]; /* padding, so that high and low start on a cache line */
};

/* --- operations ---------------------------------------------------------------------------------
 *
 * The struct of an operation has its arguments and results. bindings.py has the same structs. */

/* x (tokens, C) = columns `ids` of wte + rows `positions` of wpe. */
struct embed {
    const struct matrix *wte; /* (C, V) */
    const float *wpe;         /* (n_positions, C) */
    const int64_t *ids, *positions;
    float *x;
    int64_t tokens, n_positions;
};

struct norm {
    const float *weight, *bias; /* (C,) */
    float epsilon;
};

struct layer_norm {
    struct norm norm;
    const float *x; /* (rows, C) */
    float *y;
    int64_t rows, C, x_stride, y_stride;
};

struct linear {
    const struct matrix *w;
    const float *bias; /* (n_out,), or NULL */
    const float *x;    /* (rows, n_in) */
    float *y;          /* (rows, n_out padded to whole panels) */
    void *scratch;     /* INT8: rows * (groups * sizeof(struct digits) + 4) bytes */
    int64_t rows, x_stride, y_stride;
    int32_t activation;
};

/* sum = x + y, rows of C elements. */
struct add {
    const float *x, *y;
    float *sum;
    int64_t rows, C, x_stride, y_stride, sum_stride;
};

/* Keys are stored in panels, as the columns of a matrix (D, S), so that scores are a product. Values
 * are stored as the rows of a matrix (S, width), where `width` is D padded to whole panels. */
struct store {
    const float *k, *v; /* (B, H, T, D) with these strides; the last axis is contiguous */
    void *keys;         /* (B, H, cache_panels, D, COLUMNS) float or float16 */
    void *values;       /* (B, H, cache_panels, COLUMNS, width) */
    const int64_t *past, *lengths; /* (B,) cached tokens, and new tokens of this row: at most T */
    int64_t b_stride, h_stride, t_stride;
    int64_t B, H, T, D, cache_panels;
    int32_t half; /* the cache is float16 */
};

/* Convert rows of n numbers to float16: the panels of the heads of a cache. */
struct narrow {
    const float *x; /* (rows, n), rows `stride` apart; n is a multiple of COLUMNS */
    uint16_t *y;    /* the same */
    int64_t rows, stride, n;
};

struct attend {
    const float *q;            /* (B, H, T, D) with these strides */
    const void *keys, *values; /* as in `struct store` */
    const int64_t *visible;    /* (B, T) numbers of keys that the queries see, from key 0 */
    float *y;                  /* (B, T, H * D), rows y_stride apart */
    float *scratch;            /* (threads, min(T, MAX_TILE_ROWS), scores_stride) */
    float *scores, *pattern;   /* (B, H, T, S) for hooks, or NULL: before and after the softmax */
    /* Results, except the known step: it is an argument, and the computation begins with it. */
    int64_t b_stride, h_stride, t_stride, y_stride;
    int64_t B, H, T, D, cache_panels, S;
    float scale;
    int32_t half, known_step;
};

INLINE int64_t scores_stride(int64_t cache_panels) { return cache_panels * COLUMNS + ROW_PADDING; }

/* A transformer layer, with the names of model.py. */
struct block {
    struct norm ln_1, ln_2;
    struct matrix c_attn, c_proj, c_fc, mlp_c_proj;
    const float *c_attn_bias, *c_proj_bias, *c_fc_bias, *mlp_c_proj_bias;
    float scale;
    int32_t activation;
};

/* All blocks: x (B, T, C), rows x_stride apart -> y, rows y_stride apart. */
struct layers {
    const struct block *blocks;
    const float *x;
    float *y;
    const int64_t *visible, *past, *lengths; /* as in `struct store` and `struct attend` */
    char *keys, *values;
    float *scratch; /* `gpt2_layers_scratch` floats, on a cache line */
    int64_t n_layer, x_stride, y_stride;
    int64_t keys_bytes, values_bytes; /* from one layer of the cache to the next */
    int64_t B, H, T, D, cache_panels;
    int32_t half;
};

/* y = log(sum(exp(x))) of the rows, in float64. */
struct log_sum_exp {
    const float *x;
    double *y;
    int64_t rows, x_stride, n;
};

struct exp {
    const float *x;
    float *y;
    int64_t n;
};

struct activate {
    const float *x;
    float *y;
    int64_t n;
    int32_t activation;
};

/* Running sums of the counts of rows of finite logits, COUNT_OF_LIKELIEST for the likeliest token. */
struct cumulate {
    const float *logits; /* (rows, n) */
    int64_t *sums;       /* (rows, n) */
    int64_t rows, logits_stride, n;
};

/* The choice of tokens from rows of logits, which are finite or -INFINITY: see sampling.h. */
struct choose {
    const float *logits;    /* (rows, n) */
    const double *uniforms; /* (rows,) in [0, 1) */
    int64_t *ids;           /* (rows,) */
    float *scratch;         /* (threads, 4 n) */
    int64_t rows, logits_stride, n, top_k; /* 1 <= top_k <= n */
    double top_p;
    float temperature, log_min_p; /* -INFINITY if there is no min_p */
};

/* Tokens to draft for B texts, one after the other: see `draft` in native_ops.py. */
struct draft {
    struct embed embed;       /* of the last tokens */
    struct layers layers;     /* from embed.x; past is `positions` */
    struct layer_norm ln_f;   /* to lm_head.x */
    struct linear lm_head;    /* to choose.logits */
    struct choose choose;     /* uniforms and ids (count, B) */
    int64_t *positions;       /* (B,) of the last tokens; they advance */
    int64_t *visible;         /* (B,) positions + 1 */
    const int64_t *banned;    /* ids that may not be chosen */
    int64_t banned_count, count;
};

/* Convert a matrix that is not INT8 to INT8, panel by panel: both have the same panels. */
struct quantize {
    const struct matrix *w, *to;
};

/* Stored rows of a matrix (n_in, n_out), or (n_out, n_in) if it is transposed. INT8: unless
 * transposed, `first` is a multiple of GROUP. */
struct pack {
    const struct matrix *to;
    const void *rows;
    const float *scales;  /* INT8: of the groups of these rows */
    int64_t first, count; /* the first row and the number of rows */
    int32_t transposed;
};

/* Rows to pack that are in a file. */
struct stored_rows {
    struct pack pack; /* without `rows` */
    int64_t offset;   /* of the first row in the file, in bytes */
    int32_t file;     /* a descriptor */
    int32_t error;    /* what `gpt2_read` writes */
};

/* Several threads may read the same struct: each takes the next part. */
struct read {
    struct stored_rows *parts;
    int64_t count;
    _Atomic int64_t next; /* from `count` on, no part is left */
};

/* --- kernels ------------------------------------------------------------------------------------ */

/* Compute one part of an operation. Threads run the parts in any order. `slot` is the index of the
 * thread that runs a part: slots do not share scratch memory. */
typedef void part_function(const void *operation, int64_t part, int slot);

/* How a `struct linear` is cut into parts: ranges of panels, and of rows. */
struct linear_parts {
    const struct linear *linear;
    int64_t starts[MAX_PARTS + 1]; /* the first panels of ranges, then the number of panels */
    int64_t ranges, row_ranges;    /* a part is a pair of ranges */
    /* INT8: x rounded to 16 bits by `round_rows`: digits (rows, groups) and steps (rows,). */
    struct digits *digits;
    float *steps;
};

/* The functions of one level. Those of `linear` and `round_rows` take a `struct linear_parts`. */
struct kernels {
    const char *level;
    part_function *embed, *layer_norm, *linear, *round_rows, *add, *store, *narrow, *attend,
        *log_sum_exp, *exp, *activate, *quantize, *choose, *cumulate;
};

#endif
