/* From the order of a checkpoint to panels: see kernels.h. Processors are little-endian. */
#define _XOPEN_SOURCE 700
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "native.h"

enum {
    PIECE = 256 << 10, /* bytes of a file that are read before they are packed: they stay in a cache */
    ENDED = -1,        /* a file, before what was to be read */
    OTHER_INT8 = -2,
    SQUARE = 16,       /* columns are turned into rows by so many rows at a time */
};

static int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }

/* Rows `first` and on of a matrix (n_in, n_out), `count` of them, of numbers of `size` bytes. */
static void pack_rows(
    const char *rows, int64_t first, int64_t count, int64_t n_in, int64_t n_out, int64_t size,
    char *panels)
{
    for (int64_t column = 0; column < n_out; column += COLUMNS) { /* a panel is written in one go */
        int64_t some = smaller(n_out - column, COLUMNS);
        char *to = panels + (column * n_in + first * COLUMNS) * size;
        for (int64_t row = 0; row < count; row++)
            memcpy(to + row * COLUMNS * size, rows + (row * n_out + column) * size, some * size);
    }
}

/* Columns `first` and on of a matrix (n_in, n_out), which are rows of what is stored. */
static inline void pack_columns(
    const char *columns, int64_t first, int64_t count, int64_t n_in, int64_t size, char *panels)
{
    for (int64_t done = 0, some; done < count; done += some) {
        int64_t column = first + done;
        some = smaller(count - done, COLUMNS - column % COLUMNS);
        char *to = panels + (column / COLUMNS * n_in * COLUMNS + column % COLUMNS) * size;
        for (int64_t start = 0; start < n_in; start += SQUARE)
            for (int64_t i = 0; i < some; i++)
                for (int64_t k = start; k < smaller(start + SQUARE, n_in); k++)
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

/* One byte of each of COLUMNS columns in four rows, `some` columns and `count` rows of them given. */
static void pack_four(
    const uint8_t *rows, int64_t count, int64_t n_out, int64_t some, int8_t (*to)[4])
{
    uint8_t padded[4][COLUMNS] = {{0}};
    uint32_t groups[COLUMNS];
    for (int64_t i = 0; i < count; i++)
        memcpy(padded[i], rows + i * n_out, some);
    for (int c = 0; c < COLUMNS; c++)
        groups[c] = padded[0][c] | (uint32_t)padded[1][c] << 8 | (uint32_t)padded[2][c] << 16
            | (uint32_t)padded[3][c] << 24;
    memcpy(to, groups, sizeof groups);
}

/* Rows `first` and on, from the beginning of a block: weights (count, n_out), and scales
 * (blocks, n_out) of the precision of bfloat16. */
static void pack_int8_rows(
    const uint8_t *weights, const float *scales, int64_t first, int64_t count, int64_t n_in,
    int64_t n_out, struct int8_block *panels)
{
    int64_t blocks = (n_in + BLOCK - 1) / BLOCK;
    for (int64_t column = 0; column < n_out; column += COLUMNS) {
        int64_t some = smaller(n_out - column, COLUMNS);
        struct int8_block *panel = panels + column / COLUMNS * blocks + first / BLOCK;
        for (int64_t row = 0; row < count; row += 4)
            pack_four(weights + row * n_out + column, smaller(count - row, 4), n_out, some,
                      panel[row / BLOCK].weights[row % BLOCK / 4]);
        for (int64_t block = 0; block * BLOCK < count; block++)
            for (int64_t c = 0; c < some; c++)
                panel[block].scales[c] = upper_half(scales[block * n_out + column + c]);
    }
}

/* Columns `first` and on: weights (count, n_in), scales (count, blocks). */
static void pack_int8_columns(
    const uint8_t *weights, const float *scales, int64_t first, int64_t count, int64_t n_in,
    struct int8_block *panels)
{
    int64_t blocks = (n_in + BLOCK - 1) / BLOCK;
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

static int64_t bytes_of(int format)
{
    return format == FLOAT32 ? 4 : format == INT8 ? 1 : 2;
}

/* Return whether all weights are from -127 to 127, and all scales those of bfloat16. */
static int is_int8(const int8_t *weights, int64_t count, const float *scales, int64_t scale_count)
{
    int wrong = 0;
    uint32_t bits, rest = 0;
    for (int64_t i = 0; i < count; i++)
        wrong |= weights[i] == -128;
    for (int64_t i = 0; i < scale_count; i++) {
        memcpy(&bits, scales + i, sizeof bits);
        rest |= isfinite(scales[i]) ? bits & 0xFFFF : 0; /* weights that are not finite are told later */
    }
    return !wrong && !rest;
}

int gpt2_pack(
    const void *rows, const float *scales, int64_t first, int64_t count, int64_t n_in,
    int64_t n_out, int format, int transposed, void *panels)
{
    if (format == INT8) {
        int64_t length = transposed ? n_in : n_out, blocks = (count + BLOCK - 1) / BLOCK;
        int64_t scale_count = transposed ? count * ((n_in + BLOCK - 1) / BLOCK) : blocks * n_out;
        if (!is_int8(rows, count * length, scales, scale_count))
            return OTHER_INT8;
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

/* Fill `to` from a file. Return 0, ENDED, or the number of an error. */
static int fill(char *to, int64_t size, int file, int64_t offset)
{
    while (size > 0) {
        ssize_t some = pread(file, to, size, offset);
        if (some < 0 && errno == EINTR)
            continue;
        if (some <= 0)
            return some < 0 ? errno : ENDED;
        to += some, size -= some, offset += some;
    }
    return 0;
}

int gpt2_pack_file(
    int file, int64_t offset, const float *scales, int64_t n_in, int64_t n_out, int format,
    int transposed, void *panels)
{
    int64_t rows = transposed ? n_out : n_in;
    int64_t row_bytes = (transposed ? n_in : n_out) * bytes_of(format);
    int64_t scales_per_row = transposed ? (n_in + BLOCK - 1) / BLOCK : n_out;
    int64_t step = PIECE / row_bytes + 1;
    if (format == INT8 && !transposed)
        step = (step + BLOCK - 1) / BLOCK * BLOCK; /* whole blocks of rows */
    char *piece = malloc(step * row_bytes);
    int error = piece ? 0 : ENOMEM;
    for (int64_t first = 0; !error && first < rows; first += step) {
        int64_t count = smaller(rows - first, step);
        error = fill(piece, count * row_bytes, file, offset + first * row_bytes);
        int64_t before = (transposed ? first : first / BLOCK) * scales_per_row;
        const float *some = format == INT8 ? scales + before : NULL;
        if (!error)
            error = gpt2_pack(piece, some, first, count, n_in, n_out, format, transposed, panels);
    }
    free(piece);
    return error;
}
