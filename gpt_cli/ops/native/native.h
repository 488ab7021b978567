/* What native_ops.py calls. Shapes, types and strides are checked there. */
#ifndef GPT_CLI_NATIVE_H
#define GPT_CLI_NATIVE_H

#include "kernels.h"

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* Sizes that Python must have in common with this library, and the version of these functions: see
 * bindings.py. */
EXPORT extern const int64_t gpt2_layout[8];

/* Return whether there is a level of this name, for this processor. */
EXPORT int gpt2_has_level(const char *name);

/* Compute with this level from now on. */
EXPORT void gpt2_use_level(const char *name);

/* Return 0, or 1 if an id or a position is out of range. */
EXPORT int gpt2_embed(
    const struct matrix *wte, const float *wpe, const int64_t *ids, const int64_t *positions,
    int64_t n_positions, int64_t tokens, float *x, int threads);

EXPORT void gpt2_layer_norm(
    const float *x, int64_t rows, int64_t x_stride, int64_t C, const float *weight,
    const float *bias, float epsilon, float *y, int64_t y_stride, int threads);

/* `bias` may be NULL. `scratch` is for int8 weights: rows * (blocks * sizeof(struct digits) + 4) bytes. */
EXPORT void gpt2_linear(
    const struct matrix *w, const float *bias, const float *x, int64_t rows, int64_t x_stride,
    int activation, float *y, int64_t y_stride, void *scratch, int threads);

EXPORT void gpt2_add(
    const float *x, int64_t x_stride, const float *y, int64_t y_stride, int64_t rows, int64_t C,
    float *sum, int64_t sum_stride, int threads);

/* Return 0, or 1 if there is no room for a token, or if more than T are asked for. */
EXPORT int gpt2_store(
    const float *k, const float *v, int64_t b_stride, int64_t h_stride, int64_t t_stride,
    void *keys, void *values, const int64_t *past, const int64_t *lengths, int64_t B, int64_t H,
    int64_t T, int64_t D, int64_t blocks, int half, int threads);

/* Return 0, or 1 if a query sees no key, or more than there are.
 * `scratch` has, for each thread, min(T, MOST_ROWS) rows of blocks * COLUMNS + 16 floats. */
EXPORT int gpt2_attend(
    const float *q, int64_t b_stride, int64_t h_stride, int64_t t_stride, const void *keys,
    const void *values, const int64_t *visible, float scale, int64_t B, int64_t H, int64_t T,
    int64_t D, int64_t blocks, int half, float *y, int64_t y_stride, float *scratch,
    int64_t scratch_stride, int threads);

/* A layer, with the names of model.py. All arrays are as the operations above have them. */
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

/* x (B, T, C), rows x_stride apart -> y, likewise. Keys and values of a layer lie so many bytes behind
 * those of the layer before. Return 0, or 1 as `gpt2_store` and `gpt2_attend`. `scratch` has as many
 * floats as `gpt2_layers_scratch` returns, from the start of a cache line. */
EXPORT int gpt2_layers(
    const struct block *blocks, int64_t n_layer, const float *x, int64_t x_stride,
    const int64_t *visible, const int64_t *past, const int64_t *lengths, char *keys, char *values,
    int64_t keys_stride, int64_t values_stride, int64_t B, int64_t T, int64_t cache_blocks, int half,
    float *y, int64_t y_stride, float *scratch, int threads);
EXPORT int64_t gpt2_layers_scratch(
    const struct block *b, int64_t rows, int64_t T, int64_t cache_blocks, int threads);

EXPORT void gpt2_log_sum_exp(
    const float *x, int64_t rows, int64_t stride, int64_t n, double *y, int threads);

EXPORT void gpt2_exp(const float *x, int64_t n, float *y, int threads);

/* Pack rows `first` and on, `count` of them, of what is stored: a matrix (n_in, n_out), or (n_out, n_in)
 * if it is transposed. INT8: `scales` are those of their blocks, and `first` begins a block.
 * Return 0, or -2 if they are not int8 as `gpt-cli quantize` writes it: a weight is -128, or a scale
 * has more digits than bfloat16. */
EXPORT int gpt2_pack(
    const void *rows, const float *scales, int64_t first, int64_t count, int64_t n_in,
    int64_t n_out, int format, int transposed, void *panels);

/* Pack a matrix that lies in a file from byte `offset` on. Return 0, -1 if the file ends before,
 * -2 as `gpt2_pack`, or the number of an error. INT8: `scales` are those of all blocks. */
EXPORT int gpt2_pack_file(
    int file, int64_t offset, const float *scales, int64_t n_in, int64_t n_out, int format,
    int transposed, void *panels);

#endif
