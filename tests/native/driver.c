/* Print hashes of what the operations of a compiled library return, at each level of this processor and
 * with 1 and 2 threads: `driver LIBRARY`, lines of `level threads hash name`.
 *
 * tools/hashes.py makes the same inputs and calls the same operations from Python. Any two systems must
 * print equal hashes. An array of inputs is drawn by its name.
 */
#define _GNU_SOURCE
#include "native.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { THREADS = 2 };

static void fail(const char *what, const char *name)
{
    fprintf(stderr, "driver: %s: %s\n", what, name);
    exit(1);
}

/* --- the library --------------------------------------------------------------------------------- */

#ifdef _WIN32
#include <io.h>
extern __declspec(dllimport) void *LoadLibraryA(const char *); /* names in windows.h clash with ours */
extern __declspec(dllimport) void *GetProcAddress(void *, const char *);
#define open_library(path) LoadLibraryA(path)
#define find_in GetProcAddress
#else
#include <dlfcn.h>
#define open_library(path) dlopen(path, RTLD_NOW)
#define find_in dlsym
#endif

static void *library;
static const struct layout *layout;
static const char *level;
static int threads;

static void *find(const char *name)
{
    void *address = find_in(library, name);
    if (!address)
        fail("the library does not export", name);
    return address;
}

/* Run an operation, which must return 0. */
static void run(const char *name, const void *job)
{
    int (*function)(const void *, int) = (int (*)(const void *, int))find(name);
    if (function(job, threads))
        fail("an error of", name);
}

/* --- hashes -------------------------------------------------------------------------------------- */

/* Return the CRC-32 of zlib, continued from that of the bytes before. */
static uint32_t crc32(uint32_t before, const void *bytes, int64_t count)
{
    static uint32_t of_halves[16]; /* of bytes */
    uint32_t crc = ~before;
    for (uint32_t half = 0; half < 16; half++) {
        of_halves[half] = half;
        for (int bit = 0; bit < 4; bit++)
            of_halves[half] = of_halves[half] >> 1 ^ (of_halves[half] & 1 ? 0xEDB88320 : 0);
    }
    for (int64_t i = 0; i < count; i++) {
        crc ^= ((const uint8_t *)bytes)[i];
        crc = crc >> 4 ^ of_halves[crc & 15];
        crc = crc >> 4 ^ of_halves[crc & 15];
    }
    return ~crc;
}

/* Return a formatted text, until the next call. */
static const char *text(const char *format, ...)
{
    static char buffer[64];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(buffer, sizeof buffer, format, arguments);
    va_end(arguments);
    return buffer;
}

/* Print the hash of rows of bytes, `stride` bytes apart. */
static void print_rows(const char *name, const void *rows, int64_t count, int64_t bytes, int64_t stride)
{
    uint32_t crc = 0;
    for (int64_t row = 0; row < count; row++)
        crc = crc32(crc, (const char *)rows + row * stride, bytes);
    printf("%s %d %08x %s\n", level, threads, (unsigned)crc, name);
}

static void print_hash(const char *name, const void *bytes, int64_t count)
{
    print_rows(name, bytes, 1, count, count);
}

/* --- memory and inputs --------------------------------------------------------------------------- */

static void *memory[1000];
static int arrays;

/* Return zeros that start on a cache line, until `free_all`. */
static void *zeros(int64_t bytes)
{
    char *start = calloc(bytes + 64, 1);
    if (!start || arrays == 1000)
        fail("no memory", "zeros");
    memory[arrays++] = start;
    return start + (64 - (uintptr_t)start % 64) % 64;
}

static float *float_zeros(int64_t count) { return zeros(4 * count); }

static void free_all(void)
{
    while (arrays)
        free(memory[--arrays]);
}

/* Return number i of those that a name stands for (C. Wellons, "Prospecting for Hash Functions"). */
static uint32_t draw(const char *name, int64_t i)
{
    uint32_t x = crc32(0, name, strlen(name)) + (uint32_t)i * 0x9E3779B9;
    x = (x ^ x >> 16) * 0x7FEB352D;
    x = (x ^ x >> 15) * 0x846CA68B;
    return x ^ x >> 16;
}

/* Return floats from -scale to scale, a power of two. */
static float *floats(const char *name, int64_t count, float scale)
{
    float *x = float_zeros(count);
    for (int64_t i = 0; i < count; i++)
        x[i] = (float)((int32_t)draw(name, i) >> 8) * (scale / 8388608);
    return x;
}

/* Return integers from `first` to `last`. */
static int64_t *integers(const char *name, int64_t count, int64_t first, int64_t last)
{
    int64_t *x = zeros(8 * count);
    for (int64_t i = 0; i < count; i++)
        x[i] = first + draw(name, i) % (last - first + 1);
    return x;
}

static double *doubles(const char *name, int64_t count)
{
    double *x = zeros(8 * count);
    for (int64_t i = 0; i < count; i++)
        x[i] = draw(name, i) / 4294967296.0;
    return x;
}

/* Return weights as a format stores them: in 16 bits, with two exponents. */
static void *weights(const char *name, enum format format, int64_t count)
{
    if (format == FLOAT32)
        return floats(name, count, 0.25f);
    void *stored = zeros(count * storage_of[format].weight_bytes);
    for (int64_t i = 0; i < count; i++) {
        uint32_t x = draw(name, i);
        if (format == BFLOAT16)
            ((uint16_t *)stored)[i] = (x & 0x80FF) | 0x3E00;
        else if (format == FLOAT16)
            ((uint16_t *)stored)[i] = (x & 0x87FF) | 0x3000;
        else
            ((int8_t *)stored)[i] = (int)(x % 255) - 127;
    }
    return stored;
}

/* Return the scales of int8 weights, which bfloat16 holds. */
static float *scales(int64_t count)
{
    float *x = float_zeros(count);
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = (draw("scales", i) & 0xFF) << 16 | 0x3A800000;
        memcpy(x + i, &bits, 4);
    }
    return x;
}

/* --- matrices ------------------------------------------------------------------------------------ */

static int64_t panels_bytes(const struct matrix *w)
{
    return ceil_div(w->n_out, COLUMNS) * w->panel_bytes;
}

static struct matrix empty_matrix(enum format format, int64_t n_in, int64_t n_out)
{
    const struct storage *storage = &layout->storage[format];
    struct matrix w = {.n_in = n_in, .n_out = n_out, .format = format};
    w.panel_bytes = ceil_div(n_in, storage->unit_rows) * storage->unit_bytes;
    w.panels = zeros(panels_bytes(&w));
    return w;
}

/* Return how drawn weights are packed into a matrix. */
static struct pack packing(const char *name, const struct matrix *to, int transposed)
{
    int64_t rows = transposed ? to->n_out : to->n_in, length = transposed ? to->n_in : to->n_out;
    int64_t groups = transposed ? rows * ceil_div(length, GROUP) : ceil_div(rows, GROUP) * length;
    return (struct pack){
        .to = to, .rows = weights(name, to->format, rows * length), .count = rows,
        .scales = to->format == INT8 ? scales(groups) : NULL, .transposed = transposed,
    };
}

static struct matrix matrix_of(
    const char *name, enum format format, int64_t n_in, int64_t n_out, int transposed)
{
    struct matrix w = empty_matrix(format, n_in, n_out);
    struct pack pack = packing(name, &w, transposed);
    run("gpt2_pack", &pack);
    return w;
}

/* Pack from a file, behind a header of 24 bytes. */
static struct matrix matrix_of_file(enum format format, int64_t n_in, int64_t n_out, int transposed)
{
    struct matrix w = empty_matrix(format, n_in, n_out);
    struct stored_rows stored = {.pack = packing("pack", &w, transposed)};
    FILE *file = tmpfile();
    if (!file)
        fail("cannot write", "a temporary file");
    fwrite(zeros(24), 1, 24, file);
    fwrite(stored.pack.rows, storage_of[format].weight_bytes, n_in * n_out, file);
    fflush(file);
    stored.pack.rows = NULL, stored.file = fileno(file), stored.offset = 24;
    run("gpt2_read", &(struct read){.parts = &stored, .count = 1});
    fclose(file);
    return w;
}

static void hash_packing(enum format format)
{
    enum { N_IN = 200, N_OUT = 1500 };
    const char *type = layout->storage[format].name;
    for (int transposed = 0; transposed < 2; transposed++) {
        struct matrix w = matrix_of("pack", format, N_IN, N_OUT, transposed);
        print_hash(text("pack %s %d", type, transposed), w.panels, panels_bytes(&w));
        w = matrix_of_file(format, N_IN, N_OUT, transposed);
        print_hash(text("pack file %s %d", type, transposed), w.panels, panels_bytes(&w));
        free_all();
    }
}

static void hash_quantize(enum format format)
{
    struct matrix w = matrix_of("quantize", format, 200, 150, 0), to = empty_matrix(INT8, 200, 150);
    run("gpt2_quantize", &(struct quantize){.w = &w, .to = &to});
    print_hash(text("quantize %s", layout->storage[format].name), to.panels, panels_bytes(&to));
    free_all();
}

/* --- products and embeddings --------------------------------------------------------------------- */

static void *scratch_of(const struct matrix *w, int64_t rows)
{
    return zeros(rows * (ceil_div(w->n_in, GROUP) * layout->digits_bytes + 4));
}

static void hash_linear(enum format format)
{
    enum { N_IN = 200, N_OUT = 300 };
    static const int rows[] = {1, 2, 5, 12, 13, 37};
    struct matrix w = matrix_of("w", format, N_IN, N_OUT, 0);
    int64_t stride = padded(N_OUT);
    for (int i = 0; i < 6; i++) {
        float *y = float_zeros(rows[i] * stride);
        run("gpt2_linear", &(struct linear){
            .w = &w, .bias = i % 2 ? floats("bias", N_OUT, 1) : NULL,
            .x = floats("x", rows[i] * N_IN, 4), .y = y, .scratch = scratch_of(&w, rows[i]),
            .rows = rows[i], .x_stride = N_IN, .y_stride = stride, .activation = i,
        });
        const char *name = text("linear %s %d", layout->storage[format].name, rows[i]);
        print_rows(name, y, rows[i], 4 * N_OUT, 4 * stride);
    }
    free_all();
}

static void hash_embed(enum format format)
{
    enum { C = 70, V = 150, TOKENS = 40, POSITIONS = 60 };
    struct matrix wte = matrix_of("wte", format, C, V, 1);
    float *x = float_zeros(TOKENS * C);
    run("gpt2_embed", &(struct embed){
        .wte = &wte, .wpe = floats("wpe", POSITIONS * C, 1), .x = x, .tokens = TOKENS,
        .ids = integers("ids", TOKENS, 0, V - 1), .n_positions = POSITIONS,
        .positions = integers("positions", TOKENS, 0, POSITIONS - 1),
    });
    print_hash(text("embed %s", layout->storage[format].name), x, 4 * TOKENS * C);
    free_all();
}

/* --- rows ---------------------------------------------------------------------------------------- */

static struct norm norm_of(const char *name, int64_t C)
{
    struct norm norm = {.weight = floats(name, C, 2), .bias = floats("norm_bias", C, 1)};
    norm.epsilon = 1.0f / 131072;
    return norm;
}

static void hash_rows(void)
{
    enum { ROWS = 37, N = 1000 };
    float *x = floats("rows", ROWS * N, 8), *y = float_zeros(ROWS * N);
    run("gpt2_layer_norm", &(struct layer_norm){
        .norm = norm_of("norm", N), .x = x, .y = y, .rows = ROWS, .C = N, .x_stride = N, .y_stride = N,
    });
    print_hash("layer_norm", y, 4 * ROWS * N);
    run("gpt2_exp", &(struct exp){.x = floats("exponents", ROWS * N, 128), .y = y, .n = ROWS * N});
    print_hash("exp", y, 4 * ROWS * N);
    for (int activation = GELU_NEW; activation <= TANH; activation++) {
        run("gpt2_activate", &(struct activate){.x = x, .y = y, .n = ROWS * N, .activation = activation});
        print_hash(text("activate %d", activation), y, 4 * ROWS * N);
    }
    double *normalizers = zeros(8 * ROWS);
    run("gpt2_log_sum_exp", &(struct log_sum_exp){
        .x = x, .y = normalizers, .rows = ROWS, .x_stride = N, .n = N,
    });
    print_hash("log_sum_exp", normalizers, 8 * ROWS);
    int64_t *sums = zeros(8 * ROWS * N);
    run("gpt2_cumulate", &(struct cumulate){
        .logits = x, .sums = sums, .rows = ROWS, .logits_stride = N, .n = N,
    });
    print_hash("cumulate", sums, 8 * ROWS * N);
    for (int i = 0; i < 3; i++) {
        int64_t *ids = zeros(8 * ROWS);
        run("gpt2_choose", &(struct choose){
            .logits = x, .uniforms = doubles("uniforms", ROWS), .ids = ids, .rows = ROWS, .n = N,
            .scratch = float_zeros(4 * N * THREADS), .logits_stride = N, .top_k = i == 2 ? N : 40,
            .top_p = i == 1 ? 0.75 : 1, .temperature = i == 2 ? 2 : 0.75f,
            .log_min_p = i == 2 ? -2.772588722239781f : -INFINITY,
        });
        print_hash(text("choose %d", i), ids, 8 * ROWS);
    }
    free_all();
}

/* --- attention ----------------------------------------------------------------------------------- */

enum { B = 2, H = 3, T = 14, D = 20, CAPACITY = 80, PANELS = 3, S = 47 };

/* The keys that the queries of a text see: 33 tokens are cached of the second text, none of the
 * first, which has all new tokens, the second all but one. */
static const int64_t past[B] = {0, 33}, lengths[B] = {T, T - 1};

static int64_t *visible_keys(void)
{
    int64_t *visible = zeros(8 * B * T);
    for (int64_t i = 0; i < B * T; i++)
        visible[i] = past[i / T] + smaller(i % T, lengths[i / T] - 1) + 1;
    return visible;
}

static void hash_attention(int half)
{
    const char *type = half ? "float16" : "float32";
    int64_t bytes = half ? 2 : 4, size = B * H * PANELS * COLUMNS, heads = B * H * T * D;
    char *keys = zeros(size * D * bytes), *values = zeros(size * padded(D) * bytes);
    float *old_k = floats("old_k", B * H * CAPACITY * D, 2), *y = float_zeros(heads);
    struct store store = {
        .k = old_k, .v = floats("old_v", B * H * CAPACITY * D, 2), .keys = keys, .values = values,
        .past = zeros(8 * B), .lengths = past, .b_stride = H * CAPACITY * D, .h_stride = CAPACITY * D,
        .t_stride = D, .B = B, .H = H, .T = CAPACITY, .D = D, .cache_panels = PANELS, .half = half,
    };
    run("gpt2_store", &store); /* the tokens that are cached */
    store.k = floats("k", heads, 2), store.v = floats("v", heads, 2);
    store.past = past, store.lengths = lengths, store.T = T;
    store.b_stride = H * T * D, store.h_stride = T * D;
    run("gpt2_store", &store);
    print_hash(text("keys %s", type), keys, size * D * bytes);
    print_hash(text("values %s", type), values, size * padded(D) * bytes);
    struct attend attend = {
        .q = floats("q", heads, 4), .keys = keys, .values = values, .visible = visible_keys(), .y = y,
        .scratch = float_zeros(THREADS * MAX_TILE_ROWS * scores_stride(PANELS)),
        .b_stride = H * T * D, .h_stride = T * D, .t_stride = D, .y_stride = H * D,
        .B = B, .H = H, .T = T, .D = D, .cache_panels = PANELS, .scale = 0.25f, .half = half,
    };
    run("gpt2_attend", &attend);
    print_hash(text("attend %s", type), y, 4 * heads);
    attend.S = S;
    attend.scores = float_zeros(B * H * T * S), attend.pattern = float_zeros(B * H * T * S);
    for (int step = NOTHING; step <= PATTERN; step++) {
        attend.known_step = step;
        run("gpt2_attend", &attend);
        print_hash(text("attend %s %d", type, step), y, 4 * heads);
        print_hash(text("scores %s %d", type, step), attend.scores, 4 * B * H * T * S);
        print_hash(text("pattern %s %d", type, step), attend.pattern, 4 * B * H * T * S);
    }
    if (!half) {
        uint16_t *narrowed = zeros(2 * size * D);
        run("gpt2_narrow", &(struct narrow){
            .x = (float *)keys, .y = narrowed, .rows = B * H, .stride = PANELS * D * COLUMNS,
            .n = PANELS * D * COLUMNS,
        });
        print_hash("narrow", narrowed, 2 * size * D);
    }
    free_all();
}

/* --- a model ------------------------------------------------------------------------------------- */

enum { LAYERS = 2, C = H * D, INNER = 100, V = 150, POSITIONS = 90, COUNT = 5, BANNED = 3 };

static struct block block_of(enum format format)
{
    return (struct block){
        .ln_1 = norm_of("ln_1", C), .ln_2 = norm_of("ln_2", C),
        .c_attn = matrix_of("c_attn", format, C, 3 * C, 0), .c_attn_bias = floats("b_attn", 3 * C, 1),
        .c_proj = matrix_of("c_proj", format, C, C, 0), .c_proj_bias = floats("b_proj", C, 1),
        .c_fc = matrix_of("c_fc", format, C, INNER, 0), .c_fc_bias = floats("b_fc", INNER, 1),
        .mlp_c_proj = matrix_of("m_proj", format, INNER, C, 0), .mlp_c_proj_bias = floats("m_bias", C, 1),
        .scale = 0.25f, .activation = GELU_NEW,
    };
}

static void hash_model(enum format format)
{
    int half = format == INT8;
    const char *type = layout->storage[format].name;
    int64_t bytes = half ? 2 : 4, keys_bytes = B * H * PANELS * COLUMNS * D * bytes;
    int64_t values_bytes = B * H * PANELS * COLUMNS * padded(D) * bytes;
    int64_t (*scratch_size)(const struct layers *, int) =
        (int64_t (*)(const struct layers *, int))find("gpt2_layers_scratch");
    struct block *blocks = zeros(LAYERS * sizeof *blocks);
    for (int i = 0; i < LAYERS; i++)
        blocks[i] = block_of(format);
    float *y = float_zeros(B * T * C);
    struct layers layers = {
        .blocks = blocks, .x = floats("hidden", B * T * C, 1), .y = y, .visible = visible_keys(),
        .past = past, .lengths = lengths, .keys = zeros(LAYERS * keys_bytes),
        .values = zeros(LAYERS * values_bytes), .n_layer = LAYERS, .x_stride = C, .y_stride = C,
        .keys_bytes = keys_bytes, .values_bytes = values_bytes, .B = B, .H = H, .T = T, .D = D,
        .cache_panels = PANELS, .half = half,
    };
    layers.scratch = float_zeros(scratch_size(&layers, THREADS));
    run("gpt2_layers", &layers);
    print_hash(text("layers %s", type), y, 4 * B * T * C);

    /* Drafts go on from there, after all tokens of both texts. */
    struct matrix wte = matrix_of("wte", format, C, V, 1);
    int64_t *ids = zeros(8 * B * (COUNT + 1)), ones[B] = {1, 1}, positions[B], visible[B];
    float *x = float_zeros(B * C), *logits = float_zeros(B * padded(V));
    for (int b = 0; b < B; b++) {
        positions[b] = past[b] + lengths[b];
        visible[b] = positions[b] + 1;
        ids[b] = integers("last", B, 0, V - 1)[b];
    }
    layers.x = x, layers.y = float_zeros(B * C), layers.T = 1;
    layers.visible = visible, layers.past = positions, layers.lengths = ones;
    run("gpt2_draft", &(struct draft){
        .embed = {.wte = &wte, .wpe = floats("wpe", POSITIONS * C, 1), .ids = ids, .x = x,
                  .positions = positions, .tokens = B, .n_positions = POSITIONS},
        .layers = layers,
        .ln_f = {.norm = norm_of("ln_f", C), .x = layers.y, .y = x, .rows = B, .C = C, .x_stride = C,
                 .y_stride = C},
        .lm_head = {.w = &wte, .x = x, .y = logits, .scratch = scratch_of(&wte, B), .rows = B,
                    .x_stride = C, .y_stride = padded(V)},
        .choose = {.logits = logits, .uniforms = doubles("uniforms", B * COUNT), .ids = ids + B,
                   .scratch = float_zeros(4 * V * THREADS), .rows = B, .logits_stride = padded(V),
                   .n = V, .top_k = 40, .top_p = 1, .temperature = 1, .log_min_p = -INFINITY},
        .positions = positions, .visible = visible, .banned = integers("banned", BANNED, 0, V - 1),
        .banned_count = BANNED, .count = COUNT,
    });
    print_hash(text("draft %s", type), ids + B, 8 * B * COUNT);
    free_all();
}

int main(int count, char **arguments)
{
    static const char *const levels[] = {"avx512vnni", "avx512", "avxvnni", "avx2", "neondot", "neon"};
    library = count == 2 ? open_library(arguments[1]) : NULL;
    if (!library)
        fail("cannot load the library", count == 2 ? arguments[1] : "name one");
    layout = find("gpt2_layout");
    int (*has_level)(const char *) = (int (*)(const char *))find("gpt2_has_level");
    void (*use_level)(const char *) = (void (*)(const char *))find("gpt2_use_level");
    for (int i = 0; i < 6; i++) {
        level = levels[i];
        if (!has_level(level))
            continue;
        use_level(level);
        for (threads = 1; threads <= THREADS; threads++) {
            for (enum format format = FLOAT32; format < FORMATS; format++) {
                hash_packing(format);
                if (format != INT8)
                    hash_quantize(format);
                hash_linear(format);
                hash_embed(format);
                hash_model(format);
            }
            hash_rows();
            hash_attention(0);
            hash_attention(1);
        }
    }
    return 0;
}
