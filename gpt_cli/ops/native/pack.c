/* Pack matrices of a checkpoint into panels: see kernels.h. Assumes a little-endian processor. */
#define _XOPEN_SOURCE 700
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "native.h"

enum {
    PIECE_BYTES = 256 << 10, /* read from a file, then packed while still in the cache */
    FILE_ENDED = -1,
    INVALID_INT8 = -2,
    TRANSPOSED_ROWS = 16, /* that are transposed together */
};

/* Pack `count` rows, from row `first` on, of a matrix (n_in, n_out) of elements of `size` bytes. */
static void pack_rows(
    const char *rows, int64_t first, int64_t count, int64_t n_in, int64_t n_out, int64_t size,
    char *panels)
{
    for (int64_t column = 0; column < n_out; column += COLUMNS) { /* one panel at a time */
        int64_t width = smaller(n_out - column, COLUMNS);
        char *to = panels + (column * n_in + first * COLUMNS) * size;
        for (int64_t row = 0; row < count; row++)
            memcpy(to + row * COLUMNS * size, rows + (row * n_out + column) * size, width * size);
    }
}

/* Pack `count` columns, from column `first` on, of a matrix (n_in, n_out) that is stored transposed. */
static inline void pack_columns(
    const char *columns, int64_t first, int64_t count, int64_t n_in, int64_t size, char *panels)
{
    for (int64_t done = 0, width; done < count; done += width) {
        int64_t column = first + done;
        width = smaller(count - done, COLUMNS - column % COLUMNS);
        char *to = panels + (column / COLUMNS * n_in * COLUMNS + column % COLUMNS) * size;
        for (int64_t start = 0; start < n_in; start += TRANSPOSED_ROWS)
            for (int64_t i = 0; i < width; i++)
                for (int64_t k = start; k < smaller(start + TRANSPOSED_ROWS, n_in); k++)
                    memcpy(to + (k * COLUMNS + i) * size, columns + ((done + i) * n_in + k) * size,
                           size);
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
    uint8_t padded[4][COLUMNS] = {{0}};
    uint32_t groups[COLUMNS];
    for (int64_t i = 0; i < count; i++)
        memcpy(padded[i], rows + i * n_out, width);
    for (int c = 0; c < COLUMNS; c++)
        groups[c] = padded[0][c] | (uint32_t)padded[1][c] << 8 | (uint32_t)padded[2][c] << 16
            | (uint32_t)padded[3][c] << 24;
    memcpy(to, groups, sizeof groups);
}

/* Pack rows from `first` on, a multiple of BLOCK: weights (count, n_out), and scales (blocks, n_out)
 * that bfloat16 can hold. */
static void pack_int8_rows(
    const uint8_t *weights, const float *scales, int64_t first, int64_t count, int64_t n_in,
    int64_t n_out, struct int8_block *panels)
{
    int64_t blocks = ceil_div(n_in, BLOCK);
    for (int64_t column = 0; column < n_out; column += COLUMNS) {
        int64_t width = smaller(n_out - column, COLUMNS);
        struct int8_block *panel = panels + column / COLUMNS * blocks + first / BLOCK;
        for (int64_t row = 0; row < count; row += 4)
            pack_four(weights + row * n_out + column, smaller(count - row, 4), n_out, width,
                      panel[row / BLOCK].weights[row % BLOCK / 4]);
        for (int64_t block = 0; block * BLOCK < count; block++)
            for (int64_t c = 0; c < width; c++)
                panel[block].scales[c] = upper_half(scales[block * n_out + column + c]);
    }
}

/* Pack columns from `first` on: weights (count, n_in), scales (count, blocks). */
static void pack_int8_columns(
    const uint8_t *weights, const float *scales, int64_t first, int64_t count, int64_t n_in,
    struct int8_block *panels)
{
    int64_t blocks = ceil_div(n_in, BLOCK);
    for (int64_t i = 0; i < count; i++) {
        int64_t column = (first + i) % COLUMNS;
        struct int8_block *to = panels + (first + i) / COLUMNS * blocks;
        for (int64_t block = 0; block < blocks; block++) {
            const uint8_t *from = weights + i * n_in + block * BLOCK;
            int64_t count_k = smaller(n_in - block * BLOCK, BLOCK), k = 0;
            to[block].scales[column] = upper_half(scales[i * blocks + block]);
            for (; k + 4 <= count_k; k += 4)
                memcpy(to[block].weights[k / 4][column], from + k, 4);
            if (k < count_k)
                memcpy(to[block].weights[k / 4][column], from + k, count_k - k);
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

int gpt2_pack(
    const void *rows, const float *scales, int64_t first, int64_t count, int64_t n_in,
    int64_t n_out, int format, int transposed, void *panels)
{
    if (format == INT8) {
        int64_t length = transposed ? n_in : n_out, blocks = ceil_div(count, BLOCK);
        int64_t scale_count = transposed ? count * ceil_div(n_in, BLOCK) : blocks * n_out;
        if (!is_valid_int8(rows, count * length, scales, scale_count))
            return INVALID_INT8;
    }
    if (format == INT8 && transposed)
        pack_int8_columns(rows, scales, first, count, n_in, panels);
    else if (format == INT8)
        pack_int8_rows(rows, scales, first, count, n_in, n_out, panels);
    else if (!transposed)
        pack_rows(rows, first, count, n_in, n_out, bytes_of(format), panels);
    else if (format == FLOAT32)
        pack_columns(rows, first, count, n_in, 4, panels);
    else
        pack_columns(rows, first, count, n_in, 2, panels);
    return 0;
}

/* Read `size` bytes of a file. Return 0, FILE_ENDED or an errno. */
static int read_exactly(char *to, int64_t size, int file, int64_t offset)
{
    while (size > 0) {
        ssize_t count = pread(file, to, size, offset);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            return count < 0 ? errno : FILE_ENDED;
        to += count, size -= count, offset += count;
    }
    return 0;
}

int gpt2_pack_file(
    int file, int64_t offset, const float *scales, int64_t n_in, int64_t n_out, int format,
    int transposed, void *panels)
{
    int64_t rows = transposed ? n_out : n_in;
    int64_t row_bytes = (transposed ? n_in : n_out) * bytes_of(format);
    int64_t scales_per_row = transposed ? ceil_div(n_in, BLOCK) : n_out;
    int64_t step = PIECE_BYTES / row_bytes + 1;
    if (format == INT8 && !transposed)
        step = ceil_div(step, BLOCK) * BLOCK; /* whole blocks of rows */
    char *piece = malloc(step * row_bytes);
    int error = piece ? 0 : ENOMEM;
    for (int64_t first = 0; !error && first < rows; first += step) {
        int64_t count = smaller(rows - first, step);
        error = read_exactly(piece, count * row_bytes, file, offset + first * row_bytes);
        int64_t before = (transposed ? first : first / BLOCK) * scales_per_row;
        const float *piece_scales = format == INT8 ? scales + before : NULL;
        if (!error)
            error = gpt2_pack(
                piece, piece_scales, first, count, n_in, n_out, format, transposed, panels);
    }
    free(piece);
    return error;
}
