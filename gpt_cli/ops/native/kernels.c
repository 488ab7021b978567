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

static void round_rows(const void *operation, int64_t row, int slot)
{
    const struct linear_parts *job = operation;
    const struct linear *linear = job->linear;
    int64_t n_in = linear->w->n_in;
    job->steps[row] =
        round_row(linear->x + row * linear->x_stride, n_in, job->digits + row * ceil_div(n_in, GROUP));
}

/* A part is a range of panels and a range of rows. */
static void linear(const void *operation, int64_t part, int slot)
{
    const struct linear_parts *job = operation;
    const struct linear *linear = job->linear;
    const struct matrix *w = linear->w;
    int64_t row_range = part % job->row_ranges;
    const int64_t *starts = job->starts + part / job->row_ranges;
    /* Rows are cut between tiles: a tile of 12 rows and one of 1 take less time than 6 and 7. */
    int64_t tiles = ceil_div(linear->rows, MAX_TILE_ROWS);
    int64_t first = tiles * row_range / job->row_ranges * MAX_TILE_ROWS;
    int64_t end = tiles * (row_range + 1) / job->row_ranges * MAX_TILE_ROWS;
    int64_t rows = smaller(end, linear->rows) - first;
    int64_t groups = ceil_div(w->n_in, GROUP);
    for (int64_t panel = starts[0]; panel < starts[1]; panel++) {
        float bias[COLUMNS] = {0};
        if (linear->bias)
            memcpy(bias, linear->bias + panel * COLUMNS,
                   sizeof(float) * smaller(w->n_out - panel * COLUMNS, COLUMNS));
        float *y = linear->y + first * linear->y_stride + panel * COLUMNS;
        if (w->format == INT8)
            multiply_int8(&(struct int8_product){
                .x = job->digits + first * groups, .steps = job->steps + first,
                .w = (const struct int8_group *)panel_of(w, panel), .bias = bias, .y = y,
                .rows = rows, .groups = groups, .y_stride = linear->y_stride,
                .activation = linear->activation,
            });
        else
            multiply(w->format, &(struct product){
                .x = linear->x + first * linear->x_stride, .start = bias, .w = panel_of(w, panel),
                .y = y, .rows = rows, .K = w->n_in, .x_stride = linear->x_stride,
                .w_stride = COLUMNS, .y_stride = linear->y_stride,
                .activation = linear->activation,
            });
    }
}

/* Return one weight of a panel. */
static float weight_at(const char *panel, enum format format, int64_t row, int64_t column)
{
    if (format == FLOAT32)
        return ((const float *)panel)[row * COLUMNS + column];
    if (format == INT8) {
        const struct int8_group *group = (const struct int8_group *)panel + row / GROUP;
        vh scale = {group->scales[column]};
        return group->weights[row % GROUP / 4][column][row % 4] * widen_bfloat16(scale)[0];
    }
    vh bits = {((const uint16_t *)panel)[row * COLUMNS + column]};
    return (format == BFLOAT16 ? widen_bfloat16(bits) : widen_float16(bits))[0];
}

/* x (tokens, C) = columns `ids` of wte (C, V) + rows `positions` of wpe, for a range of tokens. */
static void embed(const void *operation, int64_t part, int slot)
{
    const struct embed *job = operation;
    const struct matrix *wte = job->wte;
    int64_t C = wte->n_in, end = smaller(job->tokens, (part + 1) * ROWS_PER_PART);
    for (int64_t token = part * ROWS_PER_PART; token < end; token++) {
        const char *panel = panel_of(wte, job->ids[token] / COLUMNS);
        const float *wpe = job->wpe + job->positions[token] * C;
        for (int64_t c = 0; c < C; c++)
            job->x[token * C + c] =
                weight_at(panel, wte->format, c, job->ids[token] % COLUMNS) + wpe[c];
    }
}

/* y (C) = (x - mean) / sqrt(variance + epsilon) * weight + bias, for a range of rows. */
static void layer_norm(const void *operation, int64_t part, int slot)
{
    const struct layer_norm *job = operation;
    int64_t C = job->C, end = smaller(job->rows, (part + 1) * ROWS_PER_PART);
    for (int64_t row = part * ROWS_PER_PART; row < end; row++) {
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
        vf per_deviation = broadcast(1.0f / sqrtf(sum_of(squares) / (float)C + job->norm.epsilon));
        for (int64_t i = 0; i < C; i += LANES) {
            vf weight = load_some(job->norm.weight + i, C - i);
            vf bias = load_some(job->norm.bias + i, C - i);
            vf normed = load_some(y + i, C - i) * per_deviation;
            store_some(y + i, multiply_add(normed, weight, bias), C - i);
        }
    }
}

static void add(const void *operation, int64_t part, int slot)
{
    const struct add *job = operation;
    int64_t end = smaller(job->rows, (part + 1) * ROWS_PER_PART);
    for (int64_t row = part * ROWS_PER_PART; row < end; row++) {
        const float *x = job->x + row * job->x_stride, *y = job->y + row * job->y_stride;
        float *sum = job->sum + row * job->sum_stride;
        for (int64_t i = 0; i < job->C; i++)
            sum[i] = x[i] + y[i];
    }
}

/* Store one element of a cache, as float16 if `half`, else as float. */
INLINE void write_number(void *cache, int64_t index, float x, int half)
{
    if (half)
        ((uint16_t *)cache)[index] = narrow_float16(broadcast(x))[0];
    else
        ((float *)cache)[index] = x;
}

/* Store the new keys and values of one head of one row. */
static void store_head(const void *operation, int64_t part, int slot)
{
    const struct store *job = operation;
    int64_t b = part / job->H, D = job->D, width = padded(D);
    int64_t from = b * job->b_stride + part % job->H * job->h_stride;
    int64_t keys = part * job->cache_panels * COLUMNS * D;
    int64_t values = part * job->cache_panels * COLUMNS * width;
    for (int64_t t = 0; t < job->lengths[b]; t++) {
        int64_t token = job->past[b] + t, row = from + t * job->t_stride;
        int64_t key = keys + token / COLUMNS * COLUMNS * D + token % COLUMNS;
        int64_t value = values + token * width;
        for (int64_t d = 0; d < D; d++) {
            write_number(job->keys, key + d * COLUMNS, job->k[row + d], job->half);
            write_number(job->values, value + d, job->v[row + d], job->half);
        }
        for (int64_t d = D; d < width; d++)
            write_number(job->values, value + d, 0, job->half);
    }
}

static void narrow(const void *operation, int64_t row, int slot)
{
    const struct narrow *job = operation;
    const float *x = job->x + row * job->stride;
    uint16_t *y = job->y + row * job->stride;
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
        largest = blend(score > largest, score, largest);
    }
    float most = largest_lane(largest);
    for (int64_t i = 0; i < ceil_div(n, PARTIAL_SUMS) * PARTIAL_SUMS; i += LANES) {
        vf weight = exp_vector(load(scores + i) - broadcast(most));
        store(scores + i, weight);
        sums[i / LANES % CHUNKS] += weight;
    }
    return sum_of(sums);
}

/* Copy factor * numbers to a row of S elements, and fill the rest of it. */
static void copy_scaled(const float *numbers, int64_t n, float factor, float *row, int64_t S, float fill)
{
    for (int64_t s = 0; s < S; s++)
        row[s] = s < n ? factor * numbers[s] : fill;
}

/* softmax(scale * q keysT, over the visible keys) values, for up to MAX_TILE_ROWS queries of a head. */
static void attend(const void *operation, int64_t part, int slot)
{
    const struct attend *job = operation;
    enum format format = job->half ? FLOAT16 : FLOAT32;
    int64_t D = job->D, width = padded(D), heads = job->B * job->H, head = part % heads;
    int64_t b = head / job->H, h = head % job->H, capacity = job->cache_panels * COLUMNS;
    /* Later queries see more keys. They come first, so that all threads finish together. */
    int64_t first = (ceil_div(job->T, MAX_TILE_ROWS) - 1 - part / heads) * MAX_TILE_ROWS;
    int64_t rows = smaller(job->T - first, MAX_TILE_ROWS), longest = 0;
    int64_t stride = scores_stride(job->cache_panels), bytes = storage_of[format].weight_bytes;
    const int64_t *visible = job->visible + b * job->T + first;
    const char *keys = (const char *)job->keys + head * capacity * D * bytes;
    const char *values = (const char *)job->values + head * capacity * width * bytes;
    float *scores = job->scratch + slot * smaller(job->T, MAX_TILE_ROWS) * stride;
    float sums[MAX_TILE_ROWS];
    struct product product = {
        .x = job->q + b * job->b_stride + h * job->h_stride + first * job->t_stride, .rows = rows,
        .K = D, .x_stride = job->t_stride, .w_stride = COLUMNS, .y_stride = stride,
    };
    for (int64_t r = 0; r < rows; r++)
        longest = larger(longest, visible[r]);
    for (int64_t s = 0, step; s < longest && job->known_step == NOTHING; s += step) {
        step = rows == 1 && s + COLUMNS < longest ? 2 * COLUMNS : COLUMNS;
        product.w = keys + s * D * bytes;
        product.y = scores + s;
        if (step > COLUMNS)
            multiply_pair(format, &product, D * COLUMNS);
        else
            multiply(format, &product);
    }
    for (int64_t r = 0; r < rows; r++) {
        float *row = scores + r * stride;
        int64_t start = (head * job->T + first + r) * job->S; /* of the row for hooks */
        sums[r] = 1;
        if (job->known_step == PATTERN)
            memcpy(row, job->pattern + start, sizeof(float) * visible[r]);
        else if (job->known_step == SCORES) {
            memcpy(row, job->scores + start, sizeof(float) * visible[r]);
            sums[r] = exponentials_of(row, visible[r], 1);
        } else {
            if (job->scores)
                copy_scaled(row, visible[r], job->scale, job->scores + start, job->S, -INFINITY);
            sums[r] = exponentials_of(row, visible[r], job->scale);
        }
        if (job->pattern && job->known_step != PATTERN)
            copy_scaled(row, visible[r], 1 / sums[r], job->pattern + start, job->S, 0);
        for (int64_t s = visible[r]; s < longest; s++)
            row[s] = 0; /* only other queries of the tile see this key */
    }
    float mixed[MAX_TILE_ROWS][2 * COLUMNS];
    product = (struct product){
        .x = scores, .y = mixed[0], .rows = rows, .K = longest, .x_stride = stride,
        .w_stride = width, .y_stride = 2 * COLUMNS,
    };
    for (int64_t d = 0, step; d < D; d += step) {
        step = rows == 1 && d + COLUMNS < D ? 2 * COLUMNS : COLUMNS;
        product.w = values + d * bytes;
        if (step > COLUMNS)
            multiply_pair(format, &product, COLUMNS);
        else
            multiply(format, &product);
        for (int64_t r = 0; r < rows; r++) {
            float *y = job->y + (b * job->T + first + r) * job->y_stride + h * D + d;
            for (int64_t i = 0; i < smaller(D - d, step); i++)
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
    if (x > SQRT_TWO) {
        x *= 0.5;
        exponent++;
    }
    double ratio = (x - 1) / (x + 1), square = ratio * ratio, series = 0;
    for (int n = LOGARITHM_TERMS; n > 0; n -= 2)
        series = series * square + 1.0 / n;
    return (double)exponent * LN2 + 2 * ratio * series;
}

/* y = log(sum(exp(x))) over a row. LOG_SUM_STEP elements at a time are added in float32 to PARTIAL_SUMS
 * sums, and those to PARTIAL_SUMS sums in float64. */
static void log_sum_exp(const void *operation, int64_t row, int slot)
{
    const struct log_sum_exp *job = operation;
    const float *x = job->x + row * job->x_stride;
    double sums[PARTIAL_SUMS] = {0};
    float most = largest_of(x, job->n);
    for (int64_t start = 0; start < job->n; start += LOG_SUM_STEP) {
        vf partial[CHUNKS] = {{0}};
        float numbers[PARTIAL_SUMS];
        int64_t end = smaller(start + LOG_SUM_STEP, job->n);
        for (int64_t i = start; i < end; i += LANES) {
            vf weight = exp_vector(load_some(x + i, end - i) - broadcast(most));
            if (end - i < LANES) { /* clear the lanes beyond the end */
                vf all = weight;
                weight = (vf){0};
                memcpy(&weight, &all, sizeof(float) * (end - i));
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

static void exponentials(const void *operation, int64_t part, int slot)
{
    const struct exp *job = operation;
    int64_t start = part * NUMBERS_PER_PART;
    exp_all(job->x + start, smaller(job->n - start, NUMBERS_PER_PART), job->y + start);
}

static void activations(const void *operation, int64_t part, int slot)
{
    const struct activate *job = operation;
    int64_t end = smaller(job->n, (part + 1) * NUMBERS_PER_PART);
    for (int64_t i = part * NUMBERS_PER_PART; i < end; i += LANES)
        store_some(job->y + i, activate(load_some(job->x + i, end - i), job->activation), end - i);
}

/* A count is 1 + floor(COUNT_OF_LIKELIEST * e^(x - the largest)): the product and the conversion are exact. */
static void cumulate(const void *operation, int64_t row, int slot)
{
    const struct cumulate *job = operation;
    const float *x = job->logits + row * job->logits_stride;
    int64_t *sums = job->sums + row * job->n, sum = 0;
    vf most = broadcast(largest_of(x, job->n));
    float weights[LANES];
    for (int64_t i = 0; i < job->n; i += LANES) {
        int64_t count = smaller(job->n - i, LANES);
        store(weights, exp_vector(load_some(x + i, count) - most) * broadcast(COUNT_OF_LIKELIEST));
        for (int64_t lane = 0; lane < count; lane++)
            sums[i + lane] = sum += 1 + (int32_t)weights[lane];
    }
}

static void quantize(const void *operation, int64_t panel, int slot)
{
    const struct quantize *job = operation;
    const struct matrix *w = job->w;
    const char *from = panel_of(w, panel);
    struct int8_group *to = (struct int8_group *)panel_of(job->to, panel);
    for (int64_t row = 0; row < w->n_in; row += GROUP, to++) {
        int64_t rows = smaller(w->n_in - row, GROUP), first = row * COLUMNS;
        switch (w->format) { /* with a constant format, the compiler specializes the calls */
        case FLOAT32: quantize_group(FLOAT32, from, first, rows, to); break;
        case BFLOAT16: quantize_group(BFLOAT16, from, first, rows, to); break;
        default: quantize_group(FLOAT16, from, first, rows, to);
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
    .exp = exponentials,
    .activate = activations,
    .quantize = quantize,
    .choose = choose,
    .cumulate = cumulate,
};
