/* The functions that native_ops.py calls, after it has checked shapes, types and strides. */
#ifndef GPT_CLI_NATIVE_H
#define GPT_CLI_NATIVE_H

#include "kernels.h"

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* The version of this interface, then the sizes that bindings.py must agree with. */
EXPORT extern const int64_t gpt2_layout[9];

/* Return whether this processor supports the level of this name. */
EXPORT int gpt2_has_level(const char *name);

/* Use this level for all later calls. */
EXPORT void gpt2_use_level(const char *name);

/* Return 0, or 1 if an id or a position is out of range. */
EXPORT int gpt2_embed(
    const struct matrix *wte, const float *wpe, const int64_t *ids, const int64_t *positions,
    int64_t n_positions, int64_t tokens, float *x, int threads);

EXPORT void gpt2_layer_norm(
    const float *x, int64_t rows, int64_t x_stride, int64_t C, const float *weight,
    const float *bias, float epsilon, float *y, int64_t y_stride, int threads);

/* `bias` may be NULL. Int8 weights need rows * (blocks * sizeof(struct digits) + 4) bytes of
 * `scratch`; others need none. */
EXPORT void gpt2_linear(
    const struct matrix *w, const float *bias, const float *x, int64_t rows, int64_t x_stride,
    int activation, float *y, int64_t y_stride, void *scratch, int threads);

/* sum = x + y, rows of C elements. Only `gpt2_layers` calls it. */
EXPORT void gpt2_add(
    const float *x, int64_t x_stride, const float *y, int64_t y_stride, int64_t rows, int64_t C,
    float *sum, int64_t sum_stride, int threads);

/* Return 0, or 1 if the cache is too small or a length is not from 0 to T. */
EXPORT int gpt2_store(
    const float *k, const float *v, int64_t b_stride, int64_t h_stride, int64_t t_stride,
    void *keys, void *values, const int64_t *past, const int64_t *lengths, int64_t B, int64_t H,
    int64_t T, int64_t D, int64_t blocks, int half, int threads);

/* y = x in float16: rows of n numbers, a multiple of COLUMNS, which are `stride` apart. */
EXPORT void gpt2_narrow(
    const float *x, int64_t rows, int64_t stride, int64_t n, uint16_t *y, int threads);

/* Return 0, or 1 if `visible` is not from 1 to the capacity.
 * `scratch` is (threads, min(T, MAX_TILE_ROWS), scratch_stride) floats, with a scratch_stride of
 * blocks * COLUMNS + 16. */
EXPORT int gpt2_attend(
    const float *q, int64_t b_stride, int64_t h_stride, int64_t t_stride, const void *keys,
    const void *values, const int64_t *visible, float scale, int64_t B, int64_t H, int64_t T,
    int64_t D, int64_t blocks, int half, float *y, int64_t y_stride, float *scratch,
    int64_t scratch_stride, int threads);

/* A layer, with the names of model.py. The arrays have the layouts of the operations above. */
struct norm {
    const float *weight, *bias; /* (C,) */
    float epsilon;
};

struct block {
    struct norm ln_1, ln_2;
    struct matrix c_attn, c_proj, c_fc, mlp_c_proj;
    const float *c_attn_bias, *c_proj_bias, *c_fc_bias, *mlp_c_proj_bias;
    int64_t n_head;
    float scale;
    int32_t activation;
};

/* Run all layers: x (B, T, C), rows x_stride apart -> y, rows y_stride apart. keys_stride and
 * values_stride are the bytes between layers of the cache. `scratch` starts on a cache line and has
 * `gpt2_layers_scratch` floats. Return 0, or 1 where `gpt2_store` or `gpt2_attend` does. */
EXPORT int gpt2_layers(
    const struct block *blocks, int64_t n_layer, const float *x, int64_t x_stride,
    const int64_t *visible, const int64_t *past, const int64_t *lengths, char *keys, char *values,
    int64_t keys_stride, int64_t values_stride, int64_t B, int64_t T, int64_t cache_blocks, int half,
    float *y, int64_t y_stride, float *scratch, int threads);
EXPORT int64_t gpt2_layers_scratch(
    const struct block *b, int64_t rows, int64_t T, int64_t cache_blocks, int threads);

/* Tokens to draft for B texts, one after the other: see `Twin` in drafts.py. */
struct draft {
    const struct block *blocks;
    const struct matrix *wte, *lm_head;
    const float *wpe, *lm_head_bias; /* lm_head_bias may be NULL */
    struct norm ln_f;
    int64_t n_layer, n_positions;
    char *keys, *values; /* of the cache; the rest as in `gpt2_layers` */
    int64_t keys_stride, values_stride, cache_blocks;
    int32_t half;
    const int64_t *banned; /* ids that may not be chosen */
    int64_t banned_count;
    float temperature, log_min_p; /* these and the next two as in `gpt2_choose` */
    int64_t top_k;
    double top_p;
    const double *uniforms; /* (count, B) */
    int64_t *positions;     /* (B,) of the last tokens */
    int64_t *visible, *new; /* (B,) to work with */
    int64_t *ids;           /* (count + 1, B): the last tokens, and room for the drafts */
    int64_t B, count;
    float *x, *normed;      /* (B, C) to work with */
    float *logits;          /* (B, V padded to whole panels) */
    float *layers, *choice; /* scratch of `gpt2_layers` and `gpt2_choose` */
    void *digits;           /* scratch of `gpt2_linear` for lm_head */
    int32_t threads;
};

/* Return 0, or 1 where `gpt2_embed` or `gpt2_layers` does. */
EXPORT int gpt2_draft(const struct draft *d);

EXPORT void gpt2_log_sum_exp(
    const float *x, int64_t rows, int64_t stride, int64_t n, double *y, int threads);

EXPORT void gpt2_exp(const float *x, int64_t n, float *y, int threads);

/* Choose a token from each row of logits (rows, n), which are finite or -INFINITY; `log_min_p` is
 * -INFINITY if there is no min_p. `scratch` is (threads, 4 n) floats. */
EXPORT void gpt2_choose(
    const float *logits, int64_t rows, int64_t stride, int64_t n, const double *uniforms,
    float temperature, int64_t top_k, double top_p, float log_min_p, float *scratch, int64_t *ids,
    int threads);

/* Write the running sums (rows, n) of the counts of finite logits (rows, n): see `struct cumulate`. */
EXPORT void gpt2_cumulate(
    const float *logits, int64_t rows, int64_t stride, int64_t n, int64_t *sums, int threads);

/* Convert a matrix that is not INT8 to INT8; `panels` has its number of panels. */
EXPORT void gpt2_quantize(const struct matrix *w, struct int8_block *panels, int threads);

/* Pack `count` stored rows, from row `first` on, of a matrix (n_in, n_out), or (n_out, n_in) if it is
 * transposed. INT8: `scales` are those of the blocks of these rows; unless transposed, `first` is a
 * multiple of BLOCK. Return 0, or -2 for int8 that `gpt-cli quantize` does not write: a weight of
 * -128, or a scale that bfloat16 cannot hold. */
EXPORT int gpt2_pack(
    const void *rows, const float *scales, int64_t first, int64_t count, int64_t n_in,
    int64_t n_out, int format, int transposed, void *panels);

/* Pack a matrix that starts at byte `offset` of a file. Return 0, -1 if the file ends too early, -2
 * where `gpt2_pack` does, or an errno. INT8: `scales` are those of all blocks. */
EXPORT int gpt2_pack_file(
    int file, int64_t offset, const float *scales, int64_t n_in, int64_t n_out, int format,
    int transposed, void *panels);

#endif
