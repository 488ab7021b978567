/* The functions that native_ops.py calls. Each cuts an operation into parts and runs them with the
 * kernels of the current level. */
#include "native.h"

#include <stddef.h>
#include <string.h>

#include "pool.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#endif

enum {
    MIN_SHARED_WORK = 20000, /* multiply-adds: with fewer, waking a thread costs more than it saves */
    MIN_PART_BYTES = 256 << 10, /* of a matrix */
    ROWS_PER_PART = 16,
};

/* --- levels, the highest first ------------------------------------------------------------------ */

#if defined(__x86_64__)

extern const struct kernels kernels_avx512vnni, kernels_avx512, kernels_avxvnni, kernels_avx2;

static int has_avx2(void)
{
    unsigned a, b, c = 0, d;
    int has_f16c = __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
    return has_f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

#ifndef WITHOUT_AVXVNNI /* defined if the compiler does not support it */
static int has_avxvnni(void)
{
    unsigned a = 0, b, c, d;
    return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif

static int has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

static int has_avx512vnni(void)
{
    return has_avx512() && __builtin_cpu_supports("avx512vnni");
}

static const struct {
    const struct kernels *kernels;
    int (*available)(void);
} levels[] = {
    {&kernels_avx512vnni, has_avx512vnni},
    {&kernels_avx512, has_avx512},
#ifndef WITHOUT_AVXVNNI
    {&kernels_avxvnni, has_avxvnni},
#endif
    {&kernels_avx2, has_avx2},
};

#else

extern const struct kernels kernels_neondot, kernels_neon;

static int has_neon(void) { return 1; }

static int has_neondot(void)
{
#if defined(__linux__)
    return getauxval(AT_HWCAP) >> 20 & 1; /* HWCAP_ASIMDDP */
#else
    return 1; /* every Apple processor that runs macOS has it */
#endif
}

static const struct {
    const struct kernels *kernels;
    int (*available)(void);
} levels[] = {
    {&kernels_neondot, has_neondot},
    {&kernels_neon, has_neon},
};

#endif

static const struct kernels *_Atomic kernels;

const int64_t gpt2_layout[] = {
    5, COLUMNS, MAX_TILE_ROWS, BLOCK, sizeof(struct int8_block), sizeof(struct digits),
    sizeof(struct matrix), sizeof(struct block), sizeof(struct draft),
};

int gpt2_has_level(const char *name)
{
    for (size_t i = 0; i < sizeof levels / sizeof *levels; i++)
        if (!strcmp(name, levels[i].kernels->level))
            return levels[i].available();
    return 0;
}

void gpt2_use_level(const char *name)
{
    for (size_t i = 0; i < sizeof levels / sizeof *levels; i++)
        if (!strcmp(name, levels[i].kernels->level))
            kernels = levels[i].kernels;
}

/* --- operations --------------------------------------------------------------------------------- */

/* Return the number of threads to use for `work` multiply-adds. */
static int useful_threads(int64_t work, int threads)
{
    return work < MIN_SHARED_WORK || threads < 1 ? 1 : threads;
}

int gpt2_embed(
    const struct matrix *wte, const float *wpe, const int64_t *ids, const int64_t *positions,
    int64_t n_positions, int64_t tokens, float *x, int threads)
{
    for (int64_t i = 0; i < tokens; i++)
        if (ids[i] < 0 || ids[i] >= wte->n_out || positions[i] < 0 || positions[i] >= n_positions)
            return 1;
    struct embed job = {
        .wte = wte, .wpe = wpe, .ids = ids, .positions = positions, .x = x, .tokens = tokens,
        .tokens_per_part = ROWS_PER_PART,
    };
    run_parts(kernels->embed, &job, ceil_div(tokens, ROWS_PER_PART), threads);
    return 0;
}

void gpt2_layer_norm(
    const float *x, int64_t rows, int64_t x_stride, int64_t C, const float *weight,
    const float *bias, float epsilon, float *y, int64_t y_stride, int threads)
{
    struct layer_norm job = {
        .x = x, .weight = weight, .bias = bias, .epsilon = epsilon, .y = y, .rows = rows,
        .x_stride = x_stride, .y_stride = y_stride, .C = C, .rows_per_part = ROWS_PER_PART,
    };
    run_parts(kernels->layer_norm, &job, ceil_div(rows, ROWS_PER_PART), threads);
}

/* Cut the panels of a matrix into parts, and return their number (guided self-scheduling). Each part is
 * 1/threads of the rest, but at least MIN_PART_BYTES: memory is read fastest in long ranges, and
 * small parts at the end let all threads finish together. */
static int cut_panels(struct linear *job, int64_t panels, int threads)
{
    const struct matrix *w = job->w;
    int64_t blocks = ceil_div(w->n_in, BLOCK);
    int64_t panel = w->format == INT8 ? blocks * (int64_t)sizeof(struct int8_block)
                                      : w->n_in * COLUMNS * bytes_of(w->format);
    int parts = 0;
    for (int64_t start = 0; start < panels; parts++) {
        int64_t left = panels - start, size = left / threads;
        if (size * panel < MIN_PART_BYTES)
            size = ceil_div(MIN_PART_BYTES, panel);
        if (parts == MAX_PARTS - 1 || size > left)
            size = left;
        job->starts[parts] = start;
        start += size;
    }
    job->starts[parts] = panels;
    return parts;
}

void gpt2_linear(
    const struct matrix *w, const float *bias, const float *x, int64_t rows, int64_t x_stride,
    int activation, float *y, int64_t y_stride, void *scratch, int threads)
{
    int64_t panels = ceil_div(w->n_out, COLUMNS), blocks = ceil_div(w->n_in, BLOCK);
    struct linear job = {
        .w = w, .bias = bias, .x = x, .y = y, .rows = rows, .x_stride = x_stride, .y_stride = y_stride,
        .activation = activation, .row_parts = 1,
        .digits = scratch, .steps = (float *)((struct digits *)scratch + rows * blocks),
    };
    threads = useful_threads(rows * w->n_in * w->n_out, threads);
    int64_t parts = cut_panels(&job, panels, threads);
    if (panels < 8 * threads && rows > MAX_TILE_ROWS)
        job.row_parts = smaller(ceil_div(rows, MAX_TILE_ROWS), threads);
    if (w->format == INT8)
        run_parts(kernels->round_rows, &job, rows, rows < ROWS_PER_PART ? 1 : threads);
    run_parts(kernels->linear, &job, parts * job.row_parts, threads);
}

void gpt2_add(
    const float *x, int64_t x_stride, const float *y, int64_t y_stride, int64_t rows, int64_t C,
    float *sum, int64_t sum_stride, int threads)
{
    struct add job = {
        .x = x, .y = y, .sum = sum, .rows = rows, .x_stride = x_stride, .y_stride = y_stride,
        .sum_stride = sum_stride, .C = C, .rows_per_part = ROWS_PER_PART,
    };
    run_parts(kernels->add, &job, ceil_div(rows, ROWS_PER_PART), threads);
}

int gpt2_store(
    const float *k, const float *v, int64_t b_stride, int64_t h_stride, int64_t t_stride,
    void *keys, void *values, const int64_t *past, const int64_t *lengths, int64_t B, int64_t H,
    int64_t T, int64_t D, int64_t blocks, int half, int threads)
{
    struct store job = {
        .k = k, .v = v, .b_stride = b_stride, .h_stride = h_stride, .t_stride = t_stride,
        .keys = keys, .values = values, .past = past, .lengths = lengths, .B = B, .H = H, .D = D,
        .blocks = blocks, .half = half,
    };
    int64_t tokens = 0;
    for (int64_t b = 0; b < B; b++) {
        if (past[b] < 0 || lengths[b] < 0 || lengths[b] > T
            || past[b] > blocks * COLUMNS - lengths[b])
            return 1;
        tokens += lengths[b];
    }
    run_parts(kernels->store, &job, B * H, useful_threads(16 * tokens * H * D, threads));
    return 0;
}

void gpt2_narrow(
    const float *x, int64_t rows, int64_t stride, int64_t n, uint16_t *y, int threads)
{
    struct narrow job = {.x = x, .y = y, .stride = stride, .n = n};
    run_parts(kernels->narrow, &job, rows, useful_threads(rows * n, threads));
}

int gpt2_attend(
    const float *q, int64_t b_stride, int64_t h_stride, int64_t t_stride, const void *keys,
    const void *values, const int64_t *visible, float scale, int64_t B, int64_t H, int64_t T,
    int64_t D, int64_t blocks, int half, float *y, int64_t y_stride, float *scratch,
    int64_t scratch_stride, int threads)
{
    struct attend job = {
        .q = q, .b_stride = b_stride, .h_stride = h_stride, .t_stride = t_stride, .keys = keys,
        .values = values, .visible = visible, .scale = scale, .B = B, .H = H, .T = T, .D = D,
        .blocks = blocks, .half = half, .y = y, .y_stride = y_stride, .scratch = scratch,
        .scratch_stride = scratch_stride, .tiles = ceil_div(T, MAX_TILE_ROWS),
    };
    int64_t seen = 0;
    for (int64_t i = 0; i < B * T; i++) {
        if (visible[i] < 1 || visible[i] > blocks * COLUMNS)
            return 1;
        seen += visible[i];
    }
    run_parts(kernels->attend, &job, B * H * job.tiles, useful_threads(2 * seen * H * D, threads));
    return 0;
}

void gpt2_log_sum_exp(
    const float *x, int64_t rows, int64_t stride, int64_t n, double *y, int threads)
{
    struct log_sum_exp job = {.x = x, .y = y, .rows = rows, .stride = stride, .n = n};
    run_parts(kernels->log_sum_exp, &job, rows, threads);
}

void gpt2_exp(const float *x, int64_t n, float *y, int threads)
{
    enum { NUMBERS_PER_PART = 4096 };
    struct exponentials job = {.x = x, .y = y, .n = n, .n_per_part = NUMBERS_PER_PART};
    run_parts(kernels->exponentials, &job, ceil_div(n, NUMBERS_PER_PART), threads);
}

void gpt2_choose(
    const float *logits, int64_t rows, int64_t stride, int64_t n, const double *uniforms,
    float temperature, int64_t top_k, double top_p, float log_min_p, float *scratch, int64_t *ids,
    int threads)
{
    struct choose job = {
        .logits = logits, .stride = stride, .n = n, .uniforms = uniforms, .temperature = temperature,
        .top_k = top_k, .top_p = top_p, .log_min_p = log_min_p, .scratch = scratch, .ids = ids,
    };
    run_parts(kernels->choose, &job, rows, threads);
}

void gpt2_cumulate(
    const float *logits, int64_t rows, int64_t stride, int64_t n, int64_t *sums, int threads)
{
    struct cumulate job = {.logits = logits, .sums = sums, .stride = stride, .n = n};
    run_parts(kernels->cumulate, &job, rows, threads);
}

void gpt2_quantize(const struct matrix *w, struct int8_block *panels, int threads)
{
    struct quantize job = {.w = w, .panels = panels};
    run_parts(kernels->quantize, &job, ceil_div(w->n_out, COLUMNS), threads);
}
