/* All layers in one call: the steps of `block` in model.py, by the same operations that Python can
 * call one by one, with the same bits. A hundred calls from Python took a fifth of a token's time,
 * because the weights evict Python's data from the processor's cache between calls. */
#include <math.h>
#include <stddef.h>

#include "native.h"

static int64_t stride_of(int64_t width) { return padded(width) + ROW_PADDING; }

/* Offsets into the scratch memory of a layer, in floats. */
struct offsets {
    int64_t normed, qkv, hidden, scores, digits, end;
};

static struct offsets offsets_of(const struct layers *job, int threads)
{
    const struct block *b = job->blocks;
    int64_t C = b->c_attn.n_in, inner = b->c_fc.n_out, is_int8 = b->c_fc.format == INT8;
    int64_t rows = job->B * job->T, groups = ceil_div(larger(C, inner), GROUP);
    struct offsets at = {0};
    at.qkv = at.normed + rows * stride_of(C);
    at.hidden = at.qkv; /* qkv is no longer needed by then */
    at.scores = at.qkv + rows * larger(stride_of(3 * C), stride_of(inner));
    at.digits =
        at.scores + threads * smaller(job->T, MAX_TILE_ROWS) * scores_stride(job->cache_panels);
    at.digits = ceil_div(at.digits, 16) * 16; /* a cache line */
    at.end = at.digits + is_int8 * rows * (groups * (int64_t)sizeof(struct digits) / 4 + 1);
    return at;
}

int64_t gpt2_layers_scratch(const struct layers *layers, int threads)
{
    return offsets_of(layers, threads).end;
}

/* Compute one block of `job`, from job->x to job->y. */
static int compute_block(const struct block *b, const struct layers *job, int threads)
{
    int64_t B = job->B, T = job->T, rows = B * T, C = b->c_attn.n_in, H = job->H, D = job->D;
    struct offsets at = offsets_of(job, threads);
    float *normed = job->scratch + at.normed, *qkv = job->scratch + at.qkv;
    float *hidden = job->scratch + at.hidden, *digits = job->scratch + at.digits;
    int64_t narrow = stride_of(C), wide = stride_of(3 * C), inner = stride_of(b->c_fc.n_out);
    struct layer_norm norm = {
        .x = job->x, .y = normed, .norm = b->ln_1, .rows = rows, .C = C, .x_stride = job->x_stride,
        .y_stride = narrow,
    };
    struct linear linear = {
        .w = &b->c_attn, .bias = b->c_attn_bias, .x = normed, .y = qkv, .scratch = digits,
        .rows = rows, .x_stride = narrow, .y_stride = wide, .activation = NONE,
    };
    struct store store = {
        .k = qkv + C, .v = qkv + 2 * C, .keys = job->keys, .values = job->values,
        .past = job->past, .lengths = job->lengths, .b_stride = T * wide, .h_stride = D,
        .t_stride = wide, .B = B, .H = H, .T = T, .D = D, .cache_panels = job->cache_panels,
        .half = job->half,
    };
    struct attend attend = {
        .q = qkv, .keys = job->keys, .values = job->values, .visible = job->visible, .y = normed,
        .scratch = job->scratch + at.scores, .b_stride = T * wide, .h_stride = D,
        .t_stride = wide, .y_stride = narrow, .B = B, .H = H, .T = T, .D = D,
        .cache_panels = job->cache_panels, .scale = b->scale, .half = job->half,
    };
    struct add add = {
        .x = job->x, .y = qkv, .sum = job->y, .rows = rows, .C = C, .x_stride = job->x_stride,
        .y_stride = wide, .sum_stride = job->y_stride,
    };
    gpt2_layer_norm(&norm, threads);
    gpt2_linear(&linear, threads);
    if (gpt2_store(&store, threads) || gpt2_attend(&attend, threads))
        return 1;
    linear.w = &b->c_proj, linear.bias = b->c_proj_bias;
    gpt2_linear(&linear, threads);
    gpt2_add(&add, threads);

    norm.x = job->y, norm.x_stride = job->y_stride, norm.norm = b->ln_2;
    gpt2_layer_norm(&norm, threads);
    linear.w = &b->c_fc, linear.bias = b->c_fc_bias, linear.activation = b->activation;
    linear.y = hidden, linear.y_stride = inner;
    gpt2_linear(&linear, threads);
    linear.w = &b->mlp_c_proj, linear.bias = b->mlp_c_proj_bias, linear.activation = NONE;
    linear.x = hidden, linear.x_stride = inner, linear.y = normed, linear.y_stride = narrow;
    gpt2_linear(&linear, threads);
    add.x = job->y, add.x_stride = job->y_stride, add.y = normed, add.y_stride = narrow;
    gpt2_add(&add, threads);
    return 0;
}

int gpt2_layers(const struct layers *layers, int threads)
{
    struct layers job = *layers;
    int failed = 0;
    for (int64_t layer = 0; layer < job.n_layer && !failed; layer++) {
        failed = compute_block(job.blocks + layer, &job, threads);
        job.x = job.y, job.x_stride = job.y_stride;
        job.keys += job.keys_bytes, job.values += job.values_bytes;
    }
    return failed;
}

int gpt2_draft(const struct draft *draft, int threads)
{
    struct embed embed = draft->embed;
    struct choose choose = draft->choose;
    float *logits = draft->lm_head.y;
    int64_t B = embed.tokens, stride = draft->lm_head.y_stride;
    for (int64_t step = 0; step < draft->count; step++) {
        if (gpt2_embed(&embed, threads) || gpt2_layers(&draft->layers, threads))
            return 1;
        gpt2_layer_norm(&draft->ln_f, threads);
        gpt2_linear(&draft->lm_head, threads);
        for (int64_t b = 0; b < B; b++) {
            for (int64_t i = 0; i < draft->banned_count; i++)
                logits[b * stride + draft->banned[i]] = -INFINITY;
            draft->positions[b]++;
            draft->visible[b]++;
        }
        gpt2_choose(&choose, threads);
        embed.ids = choose.ids;
        choose.ids += B;
        choose.uniforms += B;
    }
    return 0;
}
