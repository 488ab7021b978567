/* All layers in one call: the steps of `block` in model.py, by the same operations that Python can
 * call one by one, with the same bits. A hundred calls from Python took a fifth of a token's time,
 * because the weights evict Python's own data from the processor's cache between calls. */
#include <math.h>
#include <stddef.h>

#include "native.h"

/* Rows a power of two apart would compete for a few sets of the processor's cache. */
static int64_t stride_of(int64_t width) { return ceil_div(width, COLUMNS) * COLUMNS + 16; }

/* Offsets into the scratch memory of a layer, in floats. */
struct offsets {
    int64_t normed, qkv, hidden, scores, scores_stride, digits, end;
};

static struct offsets offsets_of(
    const struct block *b, int64_t rows, int64_t T, int64_t cache_blocks, int threads)
{
    int64_t C = b->c_attn.n_in, inner = b->c_fc.n_out, is_int8 = b->c_fc.format == INT8;
    struct offsets at = {.scores_stride = cache_blocks * COLUMNS + 16};
    at.qkv = at.normed + rows * stride_of(C);
    at.hidden = at.qkv; /* qkv is no longer needed by then */
    at.scores = at.qkv + rows * larger(stride_of(3 * C), stride_of(inner));
    at.digits = at.scores + threads * smaller(T, MAX_TILE_ROWS) * at.scores_stride;
    at.digits = ceil_div(at.digits, 16) * 16; /* a cache line */
    int64_t blocks = ceil_div(larger(C, inner), BLOCK);
    at.end = at.digits + is_int8 * rows * (blocks * (int64_t)sizeof(struct digits) / 4 + 1);
    return at;
}

int64_t gpt2_layers_scratch(
    const struct block *b, int64_t rows, int64_t T, int64_t cache_blocks, int threads)
{
    return offsets_of(b, rows, T, cache_blocks, threads).end;
}

static int compute_block(
    const struct block *b, const float *x, int64_t x_stride, const int64_t *visible,
    const int64_t *past, const int64_t *lengths, void *keys, void *values, int64_t B, int64_t T,
    int64_t cache_blocks, int half, float *y, int64_t y_stride, float *scratch, int threads)
{
    int64_t rows = B * T, C = b->c_attn.n_in, H = b->n_head, D = C / H;
    struct offsets at = offsets_of(b, rows, T, cache_blocks, threads);
    float *normed = scratch + at.normed, *qkv = scratch + at.qkv, *hidden = scratch + at.hidden;
    float *scores = scratch + at.scores, *digits = scratch + at.digits;
    int64_t narrow = stride_of(C), wide = stride_of(3 * C), inner = stride_of(b->c_fc.n_out);

    gpt2_layer_norm(
        x, rows, x_stride, C, b->ln_1.weight, b->ln_1.bias, b->ln_1.epsilon, normed, narrow,
        threads);
    gpt2_linear(
        &b->c_attn, b->c_attn_bias, normed, rows, narrow, NONE, qkv, wide, digits, threads);
    if (gpt2_store(
            qkv + C, qkv + 2 * C, T * wide, D, wide, keys, values, past, lengths, B, H, T, D,
            cache_blocks, half, threads)
        || gpt2_attend(
            qkv, T * wide, D, wide, keys, values, visible, b->scale, B, H, T, D, cache_blocks, half,
            normed, narrow, scores, at.scores_stride, threads))
        return 1;
    gpt2_linear(
        &b->c_proj, b->c_proj_bias, normed, rows, narrow, NONE, qkv, wide, digits, threads);
    gpt2_add(x, x_stride, qkv, wide, rows, C, y, y_stride, threads);

    gpt2_layer_norm(
        y, rows, y_stride, C, b->ln_2.weight, b->ln_2.bias, b->ln_2.epsilon, normed, narrow,
        threads);
    gpt2_linear(
        &b->c_fc, b->c_fc_bias, normed, rows, narrow, b->activation, hidden, inner, digits, threads);
    gpt2_linear(
        &b->mlp_c_proj, b->mlp_c_proj_bias, hidden, rows, inner, NONE, normed, narrow, digits,
        threads);
    gpt2_add(y, y_stride, normed, narrow, rows, C, y, y_stride, threads);
    return 0;
}

int gpt2_layers(
    const struct block *blocks, int64_t n_layer, const float *x, int64_t x_stride,
    const int64_t *visible, const int64_t *past, const int64_t *lengths, char *keys, char *values,
    int64_t keys_stride, int64_t values_stride, int64_t B, int64_t T, int64_t cache_blocks, int half,
    float *y, int64_t y_stride, float *scratch, int threads)
{
    int failed = 0;
    for (int64_t layer = 0; layer < n_layer && !failed; layer++) {
        failed = compute_block(
            blocks + layer, x, x_stride, visible, past, lengths, keys + layer * keys_stride,
            values + layer * values_stride, B, T, cache_blocks, half, y, y_stride, scratch, threads);
        x = y;
        x_stride = y_stride;
    }
    return failed;
}

int gpt2_draft(const struct draft *d)
{
    int64_t B = d->B, C = d->wte->n_in, V = d->lm_head->n_out;
    int64_t width = ceil_div(V, COLUMNS) * COLUMNS;
    for (int64_t step = 0; step < d->count; step++) {
        int64_t *last = d->ids + step * B;
        for (int64_t b = 0; b < B; b++) {
            d->visible[b] = d->positions[b] + 1;
            d->new[b] = 1;
        }
        if (gpt2_embed(
                d->wte, d->wpe, last, d->positions, d->n_positions, B, d->x, d->threads)
            || gpt2_layers(
                d->blocks, d->n_layer, d->x, C, d->visible, d->positions, d->new, d->keys,
                d->values, d->keys_stride, d->values_stride, B, 1, d->cache_blocks, d->half,
                d->normed, C, d->layers, d->threads))
            return 1;
        gpt2_layer_norm(
            d->normed, B, C, C, d->ln_f.weight, d->ln_f.bias, d->ln_f.epsilon, d->x, C, d->threads);
        gpt2_linear(
            d->lm_head, d->lm_head_bias, d->x, B, C, NONE, d->logits, width, d->digits, d->threads);
        for (int64_t b = 0; b < B; b++) {
            for (int64_t i = 0; i < d->banned_count; i++)
                d->logits[b * width + d->banned[i]] = -INFINITY;
            d->positions[b]++;
        }
        gpt2_choose(
            d->logits, B, width, V, d->uniforms + step * B, d->temperature, d->top_k, d->top_p,
            d->log_min_p, d->choice, last + B, d->threads);
    }
    return 0;
}
