/* The functions that native_ops.py calls. They cut an operation into parts and run these with the
 * kernels of the current level. */
#include "native.h"

#include <stddef.h>
#include <string.h>

#include "pool.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

enum {
    MIN_SHARED_WORK = 20000, /* multiply-adds: with fewer, waking a thread costs more than it saves */
    PART_BYTES = 256 << 10, /* of a matrix: memory is read fastest in long ranges */
};

/* --- levels, the highest first ------------------------------------------------------------------ */

struct level {
    const struct kernels *kernels;
    int (*available)(void);
};

#if defined(__x86_64__)

enum {
    SAVED_AVX = 0x6,     /* the registers of SSE and AVX */
    SAVED_AVX512 = 0xE0, /* masks, and the longer and further registers */
};

enum cpuid_register { EAX, EBX, ECX, EDX };

extern const struct kernels kernels_avx512vnni, kernels_avx512, kernels_avxvnni, kernels_avx2;

/* Return whether the processor has all features of a mask: bits of a register of `cpuid`.
 * (`__builtin_cpu_supports` answers 0 with the runtime of zig.) */
static int has_features(unsigned leaf, unsigned part, enum cpuid_register from, unsigned mask)
{
    unsigned registers[4] = {0}, *r = registers;
    return __get_cpuid_count(leaf, part, r, r + 1, r + 2, r + 3) && (r[from] & mask) == mask;
}

static int has_avx2(void)
{
    return (saved_registers() & SAVED_AVX) == SAVED_AVX
        && has_features(1, 0, ECX, bit_AVX | bit_FMA | bit_F16C)
        && has_features(7, 0, EBX, bit_AVX2);
}

#ifndef WITHOUT_AVXVNNI /* defined if the compiler does not support it */
static int has_avxvnni(void) { return has_avx2() && has_features(7, 1, EAX, bit_AVXVNNI); }
#endif

static int has_avx512(void)
{
    return has_avx2() && (saved_registers() & SAVED_AVX512) == SAVED_AVX512
        && has_features(7, 0, EBX, bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL);
}

static int has_avx512vnni(void) { return has_avx512() && has_features(7, 0, ECX, bit_AVX512VNNI); }

static const struct level levels[] = {
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

static int has_neondot(void) { return has_dot_products(); }

static const struct level levels[] = {
    {&kernels_neondot, has_neondot},
    {&kernels_neon, has_neon},
};

#endif

static const struct kernels *_Atomic kernels;

const struct layout gpt2_layout = {
    .version = 10,
    .columns = COLUMNS,
    .group = GROUP,
    .max_tile_rows = MAX_TILE_ROWS,
    .row_padding = ROW_PADDING,
    .digits_bytes = sizeof(struct digits),
    .formats = FORMATS,
    .storage = storage_of,
    .sizes = {
        sizeof(struct matrix), sizeof(struct norm), sizeof(struct block), sizeof(struct embed),
        sizeof(struct layer_norm), sizeof(struct linear), sizeof(struct store),
        sizeof(struct narrow), sizeof(struct attend), sizeof(struct layers),
        sizeof(struct log_sum_exp), sizeof(struct exp), sizeof(struct activate),
        sizeof(struct cumulate), sizeof(struct choose), sizeof(struct draft),
        sizeof(struct quantize), sizeof(struct pack), sizeof(struct stored_rows),
        sizeof(struct read),
    },
};

#ifndef SOURCES /* defined by hatch_build.py */
#define SOURCES ""
#endif

const char *gpt2_sources(void)
{
    return SOURCES;
}

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

/* Define an operation that has nothing to check or to decide but its number of parts. */
#define OPERATION(name, parts)                                 \
    int gpt2_##name(const struct name *job, int threads)       \
    {                                                          \
        run_parts(kernels->name, job, parts, threads);         \
        return 0;                                              \
    }

OPERATION(layer_norm, ceil_div(job->rows, ROWS_PER_PART))
OPERATION(add, ceil_div(job->rows, ROWS_PER_PART))
OPERATION(log_sum_exp, job->rows)
OPERATION(exp, ceil_div(job->n, NUMBERS_PER_PART))
OPERATION(activate, ceil_div(job->n, NUMBERS_PER_PART))
OPERATION(choose, job->rows)
OPERATION(cumulate, job->rows)
OPERATION(quantize, ceil_div(job->w->n_out, COLUMNS))

/* Return the number of threads to use for `work` multiply-adds. */
static int useful_threads(int64_t work, int threads)
{
    return work < MIN_SHARED_WORK || threads < 1 ? 1 : threads;
}

int gpt2_embed(const struct embed *embed, int threads)
{
    int64_t V = embed->wte->n_out;
    for (int64_t i = 0; i < embed->tokens; i++)
        if (embed->ids[i] < 0 || embed->ids[i] >= V || embed->positions[i] < 0
            || embed->positions[i] >= embed->n_positions)
            return 1;
    run_parts(kernels->embed, embed, ceil_div(embed->tokens, ROWS_PER_PART), threads);
    return 0;
}

/* Cut the panels of a matrix into ranges (guided self-scheduling): 1/threads of the rest, but at least
 * PART_BYTES, or half of a thread's share of a small matrix. Small ranges at the end let all threads
 * finish together. */
static void cut_panels(struct linear_parts *job, int64_t panels, int threads)
{
    int64_t bytes = job->linear->w->panel_bytes, range = 0;
    int64_t least = ceil_div(smaller(PART_BYTES, panels * bytes / (2 * threads)), bytes);
    for (int64_t start = 0; start < panels; range++) {
        int64_t left = panels - start, size = larger(left / threads, larger(least, 1));
        if (range == MAX_PARTS - 1 || size > left)
            size = left;
        job->starts[range] = start;
        start += size;
    }
    job->starts[range] = panels;
    job->ranges = range;
}

int64_t gpt2_linear_ranges(const struct linear *linear, int threads)
{
    struct linear_parts job = {.linear = linear};
    cut_panels(&job, ceil_div(linear->w->n_out, COLUMNS), threads);
    return job.ranges;
}

int gpt2_linear(const struct linear *linear, int threads)
{
    const struct matrix *w = linear->w;
    int64_t rows = linear->rows, panels = ceil_div(w->n_out, COLUMNS);
    struct digits *digits = linear->scratch;
    struct linear_parts job = {.linear = linear, .row_ranges = 1, .digits = digits};
    threads = useful_threads(rows * w->n_in * w->n_out, threads);
    cut_panels(&job, panels, threads);
    if (panels < 8 * threads && rows > MAX_TILE_ROWS)
        job.row_ranges = smaller(ceil_div(rows, MAX_TILE_ROWS), threads);
    if (w->format == INT8) {
        job.steps = (float *)(digits + rows * ceil_div(w->n_in, GROUP));
        run_parts(kernels->round_rows, &job, rows, rows < ROWS_PER_PART ? 1 : threads);
    }
    run_parts(kernels->linear, &job, job.ranges * job.row_ranges, threads);
    return 0;
}

int gpt2_store(const struct store *store, int threads)
{
    const int64_t *past = store->past, *lengths = store->lengths;
    int64_t B = store->B, H = store->H, capacity = store->cache_panels * COLUMNS, tokens = 0;
    for (int64_t b = 0; b < B; b++) {
        if (past[b] < 0 || lengths[b] < 0 || lengths[b] > store->T
            || past[b] > capacity - lengths[b])
            return 1;
        tokens += lengths[b];
    }
    int64_t work = 16 * tokens * H * store->D;
    run_parts(kernels->store, store, B * H, useful_threads(work, threads));
    return 0;
}

int gpt2_narrow(const struct narrow *narrow, int threads)
{
    int useful = useful_threads(narrow->rows * narrow->n, threads);
    run_parts(kernels->narrow, narrow, narrow->rows, useful);
    return 0;
}

int gpt2_attend(const struct attend *attend, int threads)
{
    int64_t B = attend->B, H = attend->H, T = attend->T, capacity = attend->cache_panels * COLUMNS;
    int64_t visible = 0, most = attend->scores || attend->pattern ? attend->S : capacity;
    for (int64_t i = 0; i < B * T; i++) {
        if (attend->visible[i] < 1 || attend->visible[i] > smaller(capacity, most))
            return 1;
        visible += attend->visible[i];
    }
    int64_t parts = B * H * ceil_div(T, MAX_TILE_ROWS);
    run_parts(kernels->attend, attend, parts, useful_threads(2 * visible * H * attend->D, threads));
    return 0;
}
