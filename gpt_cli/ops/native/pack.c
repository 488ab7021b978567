/* Pack matrices of a checkpoint into panels: see kernels.h. Assumes a little-endian processor. */
#include <errno.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "native.h"

enum {
    PIECE_BYTES = 256 << 10, /* read from a file, then packed while still in the cache */
    FILE_ENDED = -1,
    INVALID_INT8 = -2,
    TRANSPOSED_ROWS = 16, /* that are transposed together */
};

/* Pack rows of a matrix (n_in, n_out) in memory. */
static void pack_rows(const struct pack *pack)
{
    const struct matrix *to = pack->to;
    int64_t n_out = to->n_out, size = storage_of[to->format].weight_bytes;
    for (int64_t column = 0; column < n_out; column += COLUMNS) { /* one panel at a time */
        int64_t width = smaller(n_out - column, COLUMNS);
        char *panel = panel_of(to, column / COLUMNS) + pack->first * COLUMNS * size;
        const char *rows = (const char *)pack->rows + column * size;
        for (int64_t row = 0; row < pack->count; row++)
            memcpy(panel + row * COLUMNS * size, rows + row * n_out * size, width * size);
    }
}

/* Pack columns of a matrix (n_in, n_out) that is stored transposed. */
static inline void pack_columns(const struct pack *pack, int64_t size)
{
    const char *columns = pack->rows;
    int64_t n_in = pack->to->n_in;
    for (int64_t done = 0, width; done < pack->count; done += width) {
        int64_t column = pack->first + done;
        width = smaller(pack->count - done, COLUMNS - column % COLUMNS);
        char *panel = panel_of(pack->to, column / COLUMNS) + column % COLUMNS * size;
        for (int64_t start = 0; start < n_in; start += TRANSPOSED_ROWS)
            for (int64_t i = 0; i < width; i++)
                for (int64_t k = start; k < smaller(start + TRANSPOSED_ROWS, n_in); k++)
                    memcpy(panel + (k * COLUMNS + i) * size,
                           columns + ((done + i) * n_in + k) * size, size);
    }
}

static uint16_t upper_half(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits >> 16;
}

/* Interleave four rows of a panel. Beyond `count` rows and `width` columns, write zeros. */
static void pack_four(
    const uint8_t *rows, int64_t count, int64_t n_out, int64_t width, int8_t (*to)[4])
{
    uint8_t stored[4][COLUMNS] = {{0}};
    uint32_t fours[COLUMNS];
    for (int64_t i = 0; i < count; i++)
        memcpy(stored[i], rows + i * n_out, width);
    for (int c = 0; c < COLUMNS; c++)
        fours[c] = stored[0][c] | (uint32_t)stored[1][c] << 8 | (uint32_t)stored[2][c] << 16
            | (uint32_t)stored[3][c] << 24;
    memcpy(to, fours, sizeof fours);
}

/* Pack rows from `first` on, a multiple of GROUP: weights (count, n_out), scales (groups, n_out). */
static void pack_int8_rows(const struct pack *pack)
{
    const uint8_t *weights = pack->rows;
    int64_t n_out = pack->to->n_out, count = pack->count;
    for (int64_t column = 0; column < n_out; column += COLUMNS) {
        int64_t width = smaller(n_out - column, COLUMNS);
        struct int8_group *groups = (struct int8_group *)panel_of(pack->to, column / COLUMNS);
        groups += pack->first / GROUP;
        for (int64_t row = 0; row < count; row += 4)
            pack_four(weights + row * n_out + column, smaller(count - row, 4), n_out, width,
                      groups[row / GROUP].weights[row % GROUP / 4]);
        for (int64_t group = 0; group * GROUP < count; group++)
            for (int64_t c = 0; c < width; c++)
                groups[group].scales[c] = upper_half(pack->scales[group * n_out + column + c]);
    }
}

/* Pack columns from `first` on: weights (count, n_in), scales (count, groups). */
static void pack_int8_columns(const struct pack *pack)
{
    const uint8_t *weights = pack->rows;
    int64_t n_in = pack->to->n_in, groups = ceil_div(n_in, GROUP);
    for (int64_t i = 0; i < pack->count; i++) {
        int64_t column = (pack->first + i) % COLUMNS;
        char *panel = panel_of(pack->to, (pack->first + i) / COLUMNS);
        struct int8_group *to = (struct int8_group *)panel;
        for (int64_t group = 0; group < groups; group++, to++) {
            const uint8_t *from = weights + i * n_in + group * GROUP;
            int64_t rows = smaller(n_in - group * GROUP, GROUP), k = 0;
            to->scales[column] = upper_half(pack->scales[i * groups + group]);
            for (; k + 4 <= rows; k += 4)
                memcpy(to->weights[k / 4][column], from + k, 4);
            if (k < rows)
                memcpy(to->weights[k / 4][column], from + k, rows - k);
        }
    }
}

/* Return whether all weights are from -127 to 127, and bfloat16 can hold all scales. */
static int is_valid_int8(
    const int8_t *weights, int64_t count, const float *scales, int64_t scale_count)
{
    int wrong = 0;
    uint32_t bits, rest = 0;
    for (int64_t i = 0; i < count; i++)
        wrong |= weights[i] == -128;
    for (int64_t i = 0; i < scale_count; i++) {
        memcpy(&bits, scales + i, sizeof bits);
        if (isfinite(scales[i])) /* others are reported later, as damaged weights */
            rest |= bits & 0xFFFF;
    }
    return !wrong && !rest;
}

int gpt2_pack(const struct pack *pack, int threads)
{
    (void)threads;
    int64_t n_in = pack->to->n_in, n_out = pack->to->n_out, count = pack->count;
    int format = pack->to->format, transposed = pack->transposed;
    if (format == INT8) {
        int64_t length = transposed ? n_in : n_out;
        int64_t scales = transposed ? count * ceil_div(n_in, GROUP) : ceil_div(count, GROUP) * n_out;
        if (!pack->scales || !is_valid_int8(pack->rows, count * length, pack->scales, scales))
            return INVALID_INT8;
    }
    if (format == INT8 && transposed)
        pack_int8_columns(pack);
    else if (format == INT8)
        pack_int8_rows(pack);
    else if (!transposed)
        pack_rows(pack);
    else if (storage_of[format].weight_bytes == 4) /* a constant, so that the compiler specializes */
        pack_columns(pack, 4);
    else
        pack_columns(pack, 2);
    return 0;
}

/* Read `size` bytes of a file. Return 0, FILE_ENDED or an errno. */
static int read_exactly(char *to, int64_t size, int file, int64_t offset)
{
    while (size > 0) {
        int64_t count = read_at(file, to, size, offset);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            return count < 0 ? errno : FILE_ENDED;
        to += count, size -= count, offset += count;
    }
    return 0;
}

/* Read and pack a part, piece by piece. Return its error. */
static int read_part(const struct stored_rows *stored)
{
    const struct pack *pack = &stored->pack;
    int64_t n_in = pack->to->n_in, n_out = pack->to->n_out, transposed = pack->transposed;
    const struct storage *storage = &storage_of[pack->to->format];
    int64_t row_bytes = (transposed ? n_in : n_out) * storage->weight_bytes;
    int64_t scales_per_row = transposed ? ceil_div(n_in, GROUP) : n_out;
    int64_t step = PIECE_BYTES / row_bytes + 1;
    if (!transposed)
        step = ceil_div(step, storage->unit_rows) * storage->unit_rows;
    char *rows = malloc(step * row_bytes);
    int error = rows ? 0 : ENOMEM;
    for (int64_t done = 0; !error && done < pack->count; done += step) {
        struct pack piece = *pack;
        piece.rows = rows, piece.first += done, piece.count = smaller(pack->count - done, step);
        if (pack->scales)
            piece.scales += (transposed ? done : done / GROUP) * scales_per_row;
        int64_t offset = stored->offset + done * row_bytes;
        error = read_exactly(rows, piece.count * row_bytes, stored->file, offset);
        if (!error)
            error = gpt2_pack(&piece, 1);
    }
    free(rows);
    return error;
}

int gpt2_read(struct read *read, int threads)
{
    (void)threads;
    int failed = 0;
    int64_t part;
    while ((part = atomic_fetch_add(&read->next, 1)) < read->count) {
        int error = read_part(&read->parts[part]);
        read->parts[part].error = error;
        failed |= error != 0;
        if (error)
            atomic_store(&read->next, read->count);
    }
    return failed;
}
