/* From the order of a checkpoint to panels: see kernels.h. */
#include <string.h>

#include "native.h"

static int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }

/* Rows `first` and on of a matrix (n_in, n_out), `count` of them, of numbers of `size` bytes. */
void gpt2_pack_rows(
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

static inline void pack_columns(
    const char *columns, int64_t first, int64_t count, int64_t n_in, int64_t size, char *panels)
{
    for (int64_t done = 0, some; done < count; done += some) {
        int64_t column = first + done;
        some = smaller(count - done, COLUMNS - column % COLUMNS);
        char *to = panels + (column / COLUMNS * n_in * COLUMNS + column % COLUMNS) * size;
        for (int64_t k = 0; k < n_in; k++)
            for (int64_t i = 0; i < some; i++)
                memcpy(
                    to + (k * COLUMNS + i) * size, columns + ((done + i) * n_in + k) * size, size);
    }
}

/* Columns `first` and on of a matrix (n_in, n_out), which are rows of what is stored. */
void gpt2_pack_columns(
    const char *columns, int64_t first, int64_t count, int64_t n_in, int64_t size, char *panels)
{
    if (size == 4)
        pack_columns(columns, first, count, n_in, 4, panels);
    else
        pack_columns(columns, first, count, n_in, 2, panels);
}

static uint16_t upper_half(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits >> 16;
}

/* Rows `first` and on, from the beginning of a block: weights (count, n_out), scales (blocks, n_out)
 * of the precision of bfloat16. */
void gpt2_pack_int8_rows(
    const int8_t *weights, const float *scales, int64_t first, int64_t count, int64_t n_in,
    int64_t n_out, struct int8_block *panels)
{
    int64_t blocks = (n_in + BLOCK - 1) / BLOCK;
    for (int64_t row = 0; row < count; row++) {
        int64_t k = (first + row) % BLOCK;
        struct int8_block *block = panels + (first + row) / BLOCK;
        for (int64_t column = 0; column < n_out; column++) {
            struct int8_block *to = block + column / COLUMNS * blocks;
            to->weights[k / 4][column % COLUMNS][k % 4] = weights[row * n_out + column];
            if (k == 0)
                to->scales[column % COLUMNS] = upper_half(scales[row / BLOCK * n_out + column]);
        }
    }
}

/* Columns `first` and on: weights (count, n_in), scales (count, blocks). */
void gpt2_pack_int8_columns(
    const int8_t *weights, const float *scales, int64_t first, int64_t count, int64_t n_in,
    struct int8_block *panels)
{
    int64_t blocks = (n_in + BLOCK - 1) / BLOCK;
    for (int64_t i = 0; i < count; i++) {
        int64_t column = (first + i) % COLUMNS;
        struct int8_block *to = panels + (first + i) / COLUMNS * blocks;
        for (int64_t block = 0; block < blocks; block++) {
            const int8_t *from = weights + i * n_in + block * BLOCK;
            to[block].scales[column] = upper_half(scales[i * blocks + block]);
            for (int64_t k = 0; k < smaller(n_in - block * BLOCK, BLOCK); k += 4)
                memcpy(to[block].weights[k / 4][column], from + k,
                       smaller(n_in - block * BLOCK - k, 4));
        }
    }
}
