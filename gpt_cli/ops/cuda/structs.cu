// Layouts, and the structs of the operations. cuda/structs.py reads them.
//
// Shapes: B batch, T new tokens, S = past + T, H heads, D head size, C width. Strides count elements.
//
// A matrix (n_in, n_out) is stored as panels of PANEL columns, padded to whole panels. In a panel, 16
// bytes of a column are adjacent, as a thread reads them: 4 rows in float32, 8 in 16 bits, 16 in int8.
//
//     panel 0: columns 0 to 7           rows of FLOAT32
//     | column 0: r0 r1 r2 r3 | column 1: r0 r1 r2 r3 | ... | column 7: r0 r1 r2 r3 |   128 bytes
//     | column 0: r4 r5 r6 r7 | column 1: r4 r5 r6 r7 | ... | column 7: r4 r5 r6 r7 |
//     ...
//
// Rows are padded to a multiple of ROW_UNIT. The padding of x is 0 and that of weights is -0: their
// product, -0, changes no sum. An INT8 panel is a sequence of groups of GROUP rows, padded with zeros.

#ifndef FORMAT
#define FORMAT 0
#endif

enum {
    PANEL = 8, // columns of a panel
#if FORMAT == 0
    ROWS_PER_LOAD = 4, // rows of a column in 16 bytes
    ROW_UNIT = 32,
    UNIT_BYTES = 4 * PANEL * ROW_UNIT,
#elif FORMAT == 3
    ROWS_PER_LOAD = 16,
    ROW_UNIT = GROUP,
    UNIT_BYTES = PANEL * (GROUP + 2), // of a `struct int8_group`
#else
    ROWS_PER_LOAD = 8,
    ROW_UNIT = 32,
    UNIT_BYTES = 2 * PANEL * ROW_UNIT,
#endif
    SLOTS = 32, // of a panel of the cache
};

// Return what is at an offset of shared memory.
template <class T> DEVICE T *shared_at(int offset) { return (T *)(shared_memory + offset); }

// GROUP rows of an INT8 panel.
struct int8_group {
    int8_t weights[GROUP / 16][PANEL][16];
    uint16_t scales[PANEL]; // bfloat16
};

// A matrix (n_in, n_out).
struct matrix {
    const char *panels;
    int64_t n_in, n_out;
    int64_t units; // of ROW_UNIT rows in a panel
};

DEVICE const char *panel_of(const matrix &w, int64_t panel)
{
    return w.panels + panel * w.units * UNIT_BYTES;
}

// A stored weight, and its value; INT8 needs a scale, too.
#if FORMAT == 0
typedef float weight;
DEVICE float widen_weight(weight x) { return x; }
#elif FORMAT == 1
typedef uint16_t weight;
DEVICE float widen_weight(weight x) { return widen_bfloat16(x); }
#elif FORMAT == 2
typedef uint16_t weight;
DEVICE float widen_weight(weight x) { return widen_float16(x); }
#else
typedef int8_t weight;
#endif

// Return where a weight is in its panel, in bytes.
DEVICE int64_t weight_offset(int64_t row, int column)
{
    int64_t unit = row / ROW_UNIT, load = row % ROW_UNIT / ROWS_PER_LOAD * PANEL + column;
    return unit * UNIT_BYTES + load * 16 + row % ROWS_PER_LOAD * (int64_t)sizeof(weight);
}

// Return one weight of a panel.
DEVICE float weight_at(const char *panel, int64_t row, int column)
{
    weight stored = *(const weight *)(panel + weight_offset(row, column));
#if FORMAT == 3
    const struct int8_group *group = (const struct int8_group *)panel + row / GROUP;
    return (float)stored * widen_bfloat16(group->scales[column]);
#else
    return widen_weight(stored);
#endif
}

// Keys and values of a cache: float, or float16 beside INT8 weights.
#if FORMAT == 3
typedef uint16_t cached;
DEVICE float widen(cached x) { return widen_float16(x); }
DEVICE cached narrow(float x) { return narrow_float16(x); }
#else
typedef float cached;
DEVICE float widen(cached x) { return x; }
DEVICE cached narrow(float x) { return x; }
#endif

// Stored rows of a matrix, to be packed: (count, n_out) from row `first` on, or, if it is transposed,
// (count, n_in) from column `first` on.
struct pack {
    char *panels;
    const void *rows;    // float, 16 bits or int8, as FORMAT says
    const float *scales; // INT8: of the groups of these rows; `first` is a multiple of GROUP
    int64_t n_in, n_out, units, first, count;
    int32_t transposed;
};

struct norm {
    const float *weight, *bias; // (C,)
    float epsilon;
};

// x (tokens, C) = columns `ids` of wte + rows `positions` of wpe.
struct embed {
    matrix wte;       // (C, V)
    const float *wpe; // (n_positions, C)
    const int64_t *ids, *positions;
    float *x;
    int64_t tokens, n_positions;
};

struct layer_norm {
    struct norm ln; // CUDA has a function of this name
    const float *x; // (rows, C)
    float *y;
    int64_t rows, C;
};

// y = residual + activation(bias + x @ w).
struct linear {
    matrix w;
    const float *bias;     // (n_out,), or NULL
    const float *x;        // (rows, n_in)
    const float *residual; // (rows, n_out), or NULL
    float *y;              // (rows, n_out)
    char *digits;          // INT8: of x, by the kernel `round_rows`: rows * units * sizeof(digits)
    float *steps;          // INT8: (rows,)
    int64_t rows;
    int32_t activation;
};

// GROUP elements of x, rounded to integers 256 * high + low.
struct digits {
    int8_t high[GROUP], low[GROUP];
};

struct store {
    const float *k, *v; // (B, H, T, D) with these strides; the last axis is contiguous
    cached *keys;       // (B, H, cache_panels, D, SLOTS)
    cached *values;     // (B, H, cache_panels, SLOTS, D)
    const int64_t *past, *lengths; // (B,) cached tokens, and new tokens of this row: at most T
    int64_t b_stride, h_stride, t_stride;
    int64_t B, H, T, D, cache_panels;
};

struct attend {
    const float *q; // (B, H, T, D) with these strides
    const cached *keys, *values; // as in `struct store`
    const int64_t *visible;      // (B, T) numbers of keys that the queries see, from key 0
    float *y;                    // (B, T, H * D)
    float *scores, *pattern;     // (B, H, T, S) for hooks, or NULL: before and after the softmax
    int64_t b_stride, h_stride, t_stride;
    int64_t B, H, T, D, cache_panels, S;
    float *scratch; // by `attend_long`: (blocks, S padded to SLOTS)
    float scale;
    int32_t known_step; // of `enum known_step`: the step that is an argument
};

enum known_step { NOTHING, KNOWN_SCORES, KNOWN_PATTERN };

// total = x + y.
struct add {
    const float *x, *y;
    float *total;
    int64_t n;
};

struct elementwise {
    const float *x;
    float *y;
    int64_t n;
    int32_t activation;
};

// y = log(sum(exp(x))) of the rows, in float64.
struct log_sum_exp {
    const float *x; // (rows, n)
    double *y;
    int64_t rows, n;
};

// Running sums of the counts of rows of finite logits.
struct cumulate {
    const float *logits; // (rows, n)
    int64_t *sums;
    int64_t rows, n;
};

// The choice of tokens among the top_k likeliest: see `choose` in native/sampling.h.
struct choose {
    const float *logits;    // (rows, n), finite or -INFINITY
    const double *uniforms; // (rows,) in [0, 1)
    int64_t *ids;           // (rows,)
    float *scratch;         // (rows, CHOICE_ARRAYS, scratch_size)
    int64_t rows, n, top_k; // 1 <= top_k <= n
    int64_t scratch_size;   // a power of two, at least n rounded up to whole spans
    double top_p;
    float temperature, log_min_p; // -INFINITY if there is no min_p
};

enum { CHOICE_ARRAYS = 6 };

// The choice of the next tokens, without banned ones, and their log-probabilities among all.
struct next_tokens {
    float *logits;          // (rows, n); those of the banned tokens are set to -INFINITY
    const double *uniforms; // (rows,)
    const int64_t *banned;  // ids
    int64_t *ids;           // (rows,)
    double *logprobs;       // (rows,)
    int32_t *is_finite;     // (rows,), set to 0 if logits are not finite
    float *scratch;         // this and what follows: as in `struct choose`
    int64_t rows, n, banned_count, top_k, scratch_size;
    double top_p;
    float temperature, log_min_p;
};

// A layer, with the names of model.py.
struct layer {
    struct norm ln_1, ln_2;
    matrix c_attn, attn_c_proj, c_fc, mlp_c_proj;
    const float *c_attn_bias, *attn_c_proj_bias, *c_fc_bias, *mlp_c_proj_bias; // or NULL
    float scale;
    int32_t activation;
};

// `steps` passes over `rows` tokens each: see pass.cu.
struct pass {
    const layer *layers;
    struct norm ln_f;
    matrix lm_head, wte;
    const float *lm_head_bias, *wpe;   // a bias or NULL
    float *x, *mid, *qkv, *z, *hidden; // (rows, C), (rows, C), (rows, 3C), (rows, C), (rows, inner)
    float *logits;                     // (rows, V)
    cached *keys, *values;             // of the first layer, as in `struct store`
    int64_t keys_step, values_step;    // elements from one layer to the next
    const int64_t *texts;              // (rows,) rows of the cache
    const int64_t *positions;          // (rows,) in the first pass; one more in each further pass
    const int64_t *firsts;             // (rows,) the row of the first token of this text in a pass
    int64_t *ids;                      // (steps + 1, rows): the first are given, the others chosen
    double *logprobs;                  // (steps, rows)
    int32_t *is_finite;                // (rows,), set to 0 if logits are not finite
    const double *uniforms;            // (steps, rows)
    const int64_t *banned;             // ids that may not be chosen
    float *scratch;                    // (rows, CHOICE_ARRAYS, scratch_size)
    float *maxima, *sums;              // of logits: (rows, spans), (rows, steps, PARTIAL_SUMS)
    uint32_t *barrier;                 // a counter, at first 0
    int64_t banned_count, scratch_size, n_layer, steps, rows, C, H, D, inner, cache_panels;
    int64_t stages; // of a ring
    int64_t chunk;  // rows of a matrix whose x is in shared memory at a time: whole stages
    int64_t top_k;
    double top_p;
    float temperature, log_min_p;
    int32_t only_layers; // from x to x: no embedding, no head
};
