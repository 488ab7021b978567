/* The kernels of the processor level LEVEL. See kernels.h for shapes and layouts. */
#include "kernels.h"

#include <math.h>

#include "elementwise.h"
#include "int8.h"
#include "products.h"
#include "sampling.h"
#include "simd.h"

/* Return the sum of PARTIAL_SUMS floats, added as a tree: 0 + 8, 1 + 9, ...; then 0 + 4, ... */
INLINE float sum_of(const vf *partial)
{
    float sums[PARTIAL_SUMS];
    memcpy(sums, partial, sizeof sums);
    for (int half = PARTIAL_SUMS / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            sums[i] += sums[i + half];
    return sums[0];
}

static void round_rows(const void *given, int64_t row, int slot)
{
    const struct linear *job = given;
    int64_t blocks = ceil_div(job->w->n_in, BLOCK);
    (void)slot;
    job->steps[row] =
        round_row(job->x + row * job->x_stride, job->w->n_in, job->digits + row * blocks);
}

/* A part is a range of panels and a range of rows. */
static void linear(const void *given, int64_t part, int slot)
{
    const struct linear *job = given;
    const struct matrix *w = job->w;
    int64_t row_part = part % job->row_parts;
    const int64_t *starts = job->starts + part / job->row_parts;
    int64_t first = job->rows * row_part / job->row_parts;
    int64_t rows = job->rows * (row_part + 1) / job->row_parts - first;
    int64_t blocks = ceil_div(w->n_in, BLOCK);
    (void)slot;
    for (int64_t panel = starts[0]; panel < starts[1]; panel++) {
        float bias[COLUMNS] = {0};
        if (job->bias)
            memcpy(bias, job->bias + panel * COLUMNS,
                   sizeof(float) * smaller(w->n_out - panel * COLUMNS, COLUMNS));
        float *y = job->y + first * job->y_stride + panel * COLUMNS;
        if (w->format == INT8)
            multiply_int8(
                rows, job->digits + first * blocks, blocks, job->steps + first,
                (const struct int8_block *)w->panels + panel * blocks, bias, job->activation, y,
                job->y_stride);
        else
            multiply(
                w->format, rows, job->x + first * job->x_stride, job->x_stride, w->panels,
                panel * w->n_in * COLUMNS, COLUMNS, w->n_in, bias, job->activation, y,
                job->y_stride);
    }
}

/* x (tokens, C) = columns `ids` of wte (C, V) + rows `positions` of wpe, for a range of tokens. */
static void embed(const void *given, int64_t part, int slot)
{
    const struct embed *job = given;
    const struct matrix *wte = job->wte;
    int64_t C = wte->n_in, blocks = ceil_div(C, BLOCK);
    int64_t end = smaller(job->tokens, (part + 1) * job->tokens_per_part);
    (void)slot;
    for (int64_t token = part * job->tokens_per_part; token < end; token++) {
        int64_t panel = job->ids[token] / COLUMNS, column = job->ids[token] % COLUMNS;
        const float *wpe = job->wpe + job->positions[token] * C;
        float *x = job->x + token * C;
        for (int64_t c = 0; c < C; c++) {
            int64_t place = (panel * C + c) * COLUMNS + column;
            if (wte->format == INT8) {
                const struct int8_block *block =
                    (const struct int8_block *)wte->panels + panel * blocks + c / BLOCK;
                uint32_t bits = (uint32_t)block->scales[column] << 16;
                float scale;
                memcpy(&scale, &bits, sizeof scale);
                x[c] = block->weights[c % BLOCK / 4][column][c % 4] * scale + wpe[c];
            } else if (wte->format == FLOAT32) {
                x[c] = ((const float *)wte->panels)[place] + wpe[c];
            } else {
                vh bits = {((const uint16_t *)wte->panels)[place]};
                vf number = wte->format == BFLOAT16 ? widen_bfloat16(bits) : widen_float16(bits);
                x[c] = number[0] + wpe[c];
            }
        }
    }
}

/* y (C) = (x - mean) / sqrt(variance + epsilon) * weight + bias, for a range of rows. */
static void layer_norm(const void *given, int64_t part, int slot)
{
    const struct layer_norm *job = given;
    int64_t C = job->C, end = smaller(job->rows, (part + 1) * job->rows_per_part);
    (void)slot;
    for (int64_t row = part * job->rows_per_part; row < end; row++) {
        const float *x = job->x + row * job->x_stride;
        float *y = job->y + row * job->y_stride;
        vf sums[CHUNKS] = {{0}}, squares[CHUNKS] = {{0}};
        for (int64_t i = 0; i < C; i += LANES)
            sums[i / LANES % CHUNKS] += load_some(x + i, C - i);
        vf mean = broadcast(sum_of(sums) / (float)C);
        for (int64_t i = 0; i < C; i += LANES) {
            store_some(y + i, load_some(x + i, C - i) - mean, C - i);
            vf difference = load_some(y + i, C - i);
            vf *square = &squares[i / LANES % CHUNKS];
            *square = multiply_add(difference, difference, *square);
        }
        vf per_deviation = broadcast(1.0f / sqrtf(sum_of(squares) / (float)C + job->epsilon));
        for (int64_t i = 0; i < C; i += LANES) {
            vf weight = load_some(job->weight + i, C - i), bias = load_some(job->bias + i, C - i);
            vf normed = load_some(y + i, C - i) * per_deviation;
            store_some(y + i, multiply_add(normed, weight, bias), C - i);
        }
    }
}

static void add(const void *given, int64_t part, int slot)
{
    const struct add *job = given;
    int64_t end = smaller(job->rows, (part + 1) * job->rows_per_part);
    (void)slot;
    for (int64_t row = part * job->rows_per_part; row < end; row++) {
        const float *x = job->x + row * job->x_stride, *y = job->y + row * job->y_stride;
        float *sum = job->sum + row * job->sum_stride;
        for (int64_t i = 0; i < job->C; i++)
            sum[i] = x[i] + y[i];
    }
}

/* Store one element of a cache, as float16 if `half`, else as float. */
INLINE void write_number(void *cache, int64_t place, float x, int half)
{
    if (half)
        ((uint16_t *)cache)[place] = narrow_float16(broadcast(x))[0];
    else
        ((float *)cache)[place] = x;
}

/* Store the new keys and values of one head of one row. */
static void store_head(const void *given, int64_t part, int slot)
{
    const struct store *job = given;
    int64_t b = part / job->H, D = job->D, width = ceil_div(D, COLUMNS) * COLUMNS;
    int64_t from = b * job->b_stride + part % job->H * job->h_stride;
    int64_t keys = part * job->blocks * D * COLUMNS, values = part * job->blocks * COLUMNS * width;
    (void)slot;
    for (int64_t t = 0; t < job->lengths[b]; t++) {
        int64_t place = job->past[b] + t, row = from + t * job->t_stride;
        int64_t key = keys + place / COLUMNS * D * COLUMNS + place % COLUMNS;
        int64_t value = values + place * width;
        for (int64_t d = 0; d < D; d++) {
            write_number(job->keys, key + d * COLUMNS, job->k[row + d], job->half);
            write_number(job->values, value + d, job->v[row + d], job->half);
        }
        for (int64_t d = D; d < width; d++)
            write_number(job->values, value + d, 0, job->half);
    }
}

static void narrow(const void *given, int64_t row, int slot)
{
    const struct narrow *job = given;
    const float *x = job->x + row * job->stride;
    uint16_t *y = job->y + row * job->stride;
    (void)slot;
    for (int64_t i = 0; i < job->n; i += LANES)
        store_short(y + i, narrow_float16(load(x + i)));
}

/* Replace n scores by exp(scale * score - max(scale * score)), and return their sum. Set the elements
 * after them, up to a multiple of PARTIAL_SUMS, to 0. */
INLINE float exponentials_of(float *scores, int64_t n, float scale)
{
    vf largest = broadcast(-INFINITY), sums[CHUNKS] = {{0}};
    for (int64_t i = n; i % PARTIAL_SUMS; i++)
        scores[i] = -INFINITY;
    for (int64_t i = 0; i < n; i += LANES) {
        vf score = load(scores + i) * broadcast(scale);
        store(scores + i, score);
        largest = select(score > largest, score, largest);
    }
    float most = largest[0];
    for (int lane = 1; lane < LANES; lane++)
        most = largest[lane] > most ? largest[lane] : most;
    for (int64_t i = 0; i < ceil_div(n, PARTIAL_SUMS) * PARTIAL_SUMS; i += LANES) {
        vf weight = exp_vector(load(scores + i) - broadcast(most));
        store(scores + i, weight);
        sums[i / LANES % CHUNKS] += weight;
    }
    return sum_of(sums);
}

/* softmax(scale * q keysT, over the visible keys) values, for up to MAX_TILE_ROWS queries of a head. */
static void attend(const void *given, int64_t part, int slot)
{
    const struct attend *job = given;
    enum format format = job->half ? FLOAT16 : FLOAT32;
    int64_t D = job->D, width = ceil_div(D, COLUMNS) * COLUMNS, heads = job->B * job->H;
    int64_t b = part % heads / job->H, h = part % job->H;
    /* Later queries see more keys. They come first, so that all threads finish together. */
    int64_t first = (job->tiles - 1 - part / heads) * MAX_TILE_ROWS;
    int64_t rows = smaller(job->T - first, MAX_TILE_ROWS), longest = 0;
    const float *q = job->q + b * job->b_stride + h * job->h_stride + first * job->t_stride;
    const int64_t *visible = job->visible + b * job->T + first;
    float *scores = job->scratch + slot * smaller(job->T, MAX_TILE_ROWS) * job->scratch_stride;
    float sums[MAX_TILE_ROWS];
    int64_t keys = part % heads * job->blocks * D * COLUMNS;
    int64_t values = part % heads * job->blocks * COLUMNS * width;
    for (int64_t r = 0; r < rows; r++)
        longest = visible[r] > longest ? visible[r] : longest;
    for (int64_t s = 0, some; s < longest; s += some) {
        some = rows == 1 && s + COLUMNS < longest ? 2 * COLUMNS : COLUMNS;
        if (some > COLUMNS)
            multiply_pair(
                format, q, job->keys, keys + s * D, COLUMNS, D * COLUMNS, D, scores + s);
        else
            multiply(
                format, rows, q, job->t_stride, job->keys, keys + s * D, COLUMNS, D, NULL, NONE,
                scores + s, job->scratch_stride);
    }
    for (int64_t r = 0; r < rows; r++) {
        float *row = scores + r * job->scratch_stride;
        sums[r] = exponentials_of(row, visible[r], job->scale);
        for (int64_t s = visible[r]; s < longest; s++)
            row[s] = 0; /* only other queries of the tile see this key */
    }
    for (int64_t d = 0, some; d < D; d += some) {
        float mixed[MAX_TILE_ROWS][2 * COLUMNS];
        some = rows == 1 && d + COLUMNS < D ? 2 * COLUMNS : COLUMNS;
        if (some > COLUMNS)
            multiply_pair(
                format, scores, job->values, values + d, width, COLUMNS, longest, mixed[0]);
        else
            multiply(
                format, rows, scores, job->scratch_stride, job->values, values + d, width, longest,
                NULL, NONE, mixed[0], 2 * COLUMNS);
        for (int64_t r = 0; r < rows; r++) {
            float *y = job->y + (b * job->T + first + r) * job->y_stride + h * D + d;
            for (int64_t i = 0; i < smaller(D - d, some); i++)
                y[i] = mixed[r][i] / sums[r];
        }
    }
}

/* Return the natural logarithm of a finite x >= 1: its exponent, plus the atanh series of the rest. */
static double logarithm(double x)
{
    int64_t bits;
    memcpy(&bits, &x, sizeof bits);
    int64_t exponent = (bits >> 52) - 1023;
    bits -= exponent << 52;
    memcpy(&x, &bits, sizeof x); /* now 1 <= x < 2 */
    if (x > 1.4142135623730951) {
        x *= 0.5;
        exponent++;
    }
    double ratio = (x - 1) / (x + 1), square = ratio * ratio, series = 0;
    for (int n = 23; n > 0; n -= 2)
        series = series * square + 1.0 / n;
    return (double)exponent * 0.6931471805599453 + 2 * ratio * series;
}

/* y = log(sum(exp(x))) over a row. STEP elements at a time are added in float32 to PARTIAL_SUMS
 * sums, and those to PARTIAL_SUMS sums in float64. */
static void log_sum_exp(const void *given, int64_t row, int slot)
{
    enum { STEP = 16 * PARTIAL_SUMS };
    const struct log_sum_exp *job = given;
    const float *x = job->x + row * job->stride;
    double sums[PARTIAL_SUMS] = {0};
    float most = largest_of(x, job->n);
    (void)slot;
    for (int64_t start = 0; start < job->n; start += STEP) {
        vf partial[CHUNKS] = {{0}};
        float numbers[PARTIAL_SUMS];
        int64_t end = smaller(start + STEP, job->n);
        for (int64_t i = start; i < end; i += LANES) {
            vf weight = exp_vector(load_some(x + i, end - i) - broadcast(most));
            if (end - i < LANES) { /* clear the lanes beyond the end */
                vf some = weight;
                weight = (vf){0};
                memcpy(&weight, &some, sizeof(float) * (end - i));
            }
            partial[i / LANES % CHUNKS] += weight;
        }
        memcpy(numbers, partial, sizeof numbers);
        for (int i = 0; i < PARTIAL_SUMS; i++)
            sums[i] += numbers[i];
    }
    for (int half = PARTIAL_SUMS / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            sums[i] += sums[i + half];
    job->y[row] = sums[0] >= 1 && sums[0] < INFINITY ? most + logarithm(sums[0]) : NAN;
}

static void exponentials(const void *given, int64_t part, int slot)
{
    const struct exponentials *job = given;
    int64_t end = smaller(job->n, (part + 1) * job->n_per_part);
    (void)slot;
    for (int64_t i = part * job->n_per_part; i < end; i += LANES)
        store_some(job->y + i, exp_vector(load_some(job->x + i, end - i)), end - i);
}

/* A count is 1 + floor(ONE * e^(x - the largest)): the product and the conversion are exact. */
static void cumulate(const void *given, int64_t row, int slot)
{
    const struct cumulate *job = given;
    const float *x = job->logits + row * job->stride;
    int64_t *sums = job->sums + row * job->n, sum = 0;
    vf most = broadcast(largest_of(x, job->n));
    float weights[LANES];
    (void)slot;
    for (int64_t i = 0; i < job->n; i += LANES) {
        int64_t some = smaller(job->n - i, LANES);
        store(weights, exp_vector(load_some(x + i, some) - most) * broadcast(ONE));
        for (int64_t lane = 0; lane < some; lane++)
            sums[i + lane] = sum += 1 + (int32_t)weights[lane];
    }
}

static void quantize(const void *given, int64_t panel, int slot)
{
    const struct quantize *job = given;
    const struct matrix *w = job->w;
    (void)slot;
    for (int64_t row = 0; row < w->n_in; row += BLOCK) {
        int64_t place = (panel * w->n_in + row) * COLUMNS, rows = smaller(w->n_in - row, BLOCK);
        struct int8_block *to = job->panels + panel * ceil_div(w->n_in, BLOCK) + row / BLOCK;
        switch (w->format) { /* with a constant format, the compiler specializes each call */
        case FLOAT32: quantize_block(FLOAT32, w->panels, place, rows, to); break;
        case BFLOAT16: quantize_block(BFLOAT16, w->panels, place, rows, to); break;
        default: quantize_block(FLOAT16, w->panels, place, rows, to);
        }
    }
}

#define NAME_OF(level) kernels_##level
#define NAME(level) NAME_OF(level)
#define TEXT_OF(level) #level
#define TEXT(level) TEXT_OF(level)

const struct kernels NAME(LEVEL) = {
    .level = TEXT(LEVEL),
    .embed = embed,
    .layer_norm = layer_norm,
    .linear = linear,
    .round_rows = round_rows,
    .add = add,
    .store = store_head,
    .narrow = narrow,
    .attend = attend,
    .log_sum_exp = log_sum_exp,
    .exponentials = exponentials,
    .quantize = quantize,
    .choose = choose,
    .cumulate = cumulate,
};
