/* What native_ops.py calls: each operation cut in parts, for the kernels of the level that is used. */
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
    SMALL = 20000, /* multiply-adds: below this, waking another thread takes longer than the work */
    LEAST = 256 << 10, /* bytes of a matrix in a part */
    SOME_ROWS = 16,
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

#ifndef WITHOUT_AVXVNNI /* the compiler does not know it */
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
    return 1; /* all processors of Apple that run macOS */
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
    1, COLUMNS, MOST_ROWS, BLOCK, sizeof(struct int8_block), sizeof(struct digits),
    sizeof(struct matrix), sizeof(struct block),
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

static int64_t parts_of(int64_t n, int64_t size) { return (n + size - 1) / size; }

/* How many threads are worth waking for so many multiply-adds. */
static int useful(int64_t work, int threads)
{
    return work < SMALL || threads < 1 ? 1 : threads;
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
        .tokens_per_part = SOME_ROWS,
    };
    run_parts(kernels->embed, &job, parts_of(tokens, SOME_ROWS), threads);
    return 0;
}

void gpt2_layer_norm(
    const float *x, int64_t rows, int64_t x_stride, int64_t C, const float *weight,
    const float *bias, float epsilon, float *y, int64_t y_stride, int threads)
{
    struct layer_norm job = {
        .x = x, .weight = weight, .bias = bias, .epsilon = epsilon, .y = y, .rows = rows,
        .x_stride = x_stride, .y_stride = y_stride, .C = C, .rows_per_part = SOME_ROWS,
    };
    run_parts(kernels->layer_norm, &job, parts_of(rows, SOME_ROWS), threads);
}

/* Cut the panels of a matrix in parts (guided self-scheduling). Each is 1/threads of what is left, but
 * at least LEAST bytes: memory is read fastest in long stretches, and small parts at the end let
 * threads end at the same time. Return how many parts there are. */
static int cut_panels(struct linear *job, int64_t panels, int threads)
{
    static const int sizes[] = {[FLOAT32] = 4, [BFLOAT16] = 2, [FLOAT16] = 2};
    const struct matrix *w = job->w;
    int64_t blocks = parts_of(w->n_in, BLOCK);
    int64_t panel = w->format == INT8 ? blocks * (int64_t)sizeof(struct int8_block)
                                      : w->n_in * COLUMNS * sizes[w->format];
    int parts = 0;
    for (int64_t start = 0; start < panels; parts++) {
        int64_t left = panels - start, size = left / threads;
        if (size * panel < LEAST)
            size = parts_of(LEAST, panel);
        if (parts == MOST_PARTS - 1 || size > left)
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
    int64_t panels = parts_of(w->n_out, COLUMNS), blocks = parts_of(w->n_in, BLOCK);
    struct linear job = {
        .w = w, .bias = bias, .x = x, .y = y, .rows = rows, .x_stride = x_stride, .y_stride = y_stride,
        .activation = activation, .row_parts = 1,
        .digits = scratch, .steps = (float *)((struct digits *)scratch + rows * blocks),
    };
    threads = useful(rows * w->n_in * w->n_out, threads);
    int64_t parts = cut_panels(&job, panels, threads);
    if (panels < 8 * threads && rows > MOST_ROWS)
        job.row_parts = parts_of(rows, MOST_ROWS) < threads ? parts_of(rows, MOST_ROWS) : threads;
    if (w->format == INT8)
        run_parts(kernels->round_rows, &job, rows, rows < SOME_ROWS ? 1 : threads);
    run_parts(kernels->linear, &job, parts * job.row_parts, threads);
}

void gpt2_add(
    const float *x, int64_t x_stride, const float *y, int64_t y_stride, int64_t rows, int64_t C,
    float *sum, int64_t sum_stride, int threads)
{
    struct add job = {
        .x = x, .y = y, .sum = sum, .rows = rows, .x_stride = x_stride, .y_stride = y_stride,
        .sum_stride = sum_stride, .C = C, .rows_per_part = SOME_ROWS,
    };
    run_parts(kernels->add, &job, parts_of(rows, SOME_ROWS), threads);
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
    run_parts(kernels->store, &job, B * H, useful(16 * tokens * H * D, threads));
    return 0;
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
        .scratch_stride = scratch_stride, .tiles = parts_of(T, MOST_ROWS),
    };
    int64_t seen = 0;
    for (int64_t i = 0; i < B * T; i++) {
        if (visible[i] < 1 || visible[i] > blocks * COLUMNS)
            return 1;
        seen += visible[i];
    }
    run_parts(kernels->attend, &job, B * H * job.tiles, useful(2 * seen * H * D, threads));
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
    enum { SOME = 4096 };
    struct exponentials job = {.x = x, .y = y, .n = n, .n_per_part = SOME};
    run_parts(kernels->exponentials, &job, parts_of(n, SOME), threads);
}
