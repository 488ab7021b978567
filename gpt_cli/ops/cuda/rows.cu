// Operations on single rows and numbers: embeddings, layer norm, rounding to integers, elementwise
// functions. See kernels.c and int8.h in ops/native.

// x (tokens, C) = columns `ids` of wte + rows `positions` of wpe.
//
// grid: tokens; block: any; no shared memory. A block computes a token. An id or a position that is out
// of range gives NaN, which is reported as an error of the results.
KERNEL embed(const struct embed job)
{
    int64_t token = blockIdx.x, C = job.wte.n_in, id = job.ids[token], position = job.positions[token];
    bool is_valid = id >= 0 && id < job.wte.n_out && position >= 0 && position < job.n_positions;
    const char *panel = panel_of(job.wte, is_valid ? id / PANEL : 0);
    const float *wpe = job.wpe + (is_valid ? position * C : 0);
    for (int64_t c = threadIdx.x; c < C; c += blockDim.x)
        job.x[token * C + c] = is_valid ? weight_at(panel, c, id % PANEL) + wpe[c] : NAN;
}

// Copy a row of x to shared memory, all of its numbers at once.
DEVICE void load_row(const float *x, int C, float *row)
{
    if (C % 4 == 0 && (int64_t)x % 16 == 0)
        for (int c = 4 * threadIdx.x; c < C; c += 4 * blockDim.x)
            copy16(row + c, x + c);
    else
        for (int c = threadIdx.x; c < C; c += blockDim.x)
            row[c] = x[c];
    commit_copies();
    wait_for_copies<0>();
    sync_block();
}

// y (C) = (x - mean) / sqrt(variance + epsilon) * weight + bias.
//
// grid: rows; block: whole warps; shared memory: C floats, padded to 16 bytes, and 2 more. All threads
// load the row. The first warp adds: both of its halves the same numbers, lane i and lane i + 16 those
// of partial sum i. All threads compute the results.
KERNEL layer_norm(const struct layer_norm job)
{
    int C = (int)job.C, lane = threadIdx.x % WARP;
    int64_t start = blockIdx.x * job.C;
    float *row = (float *)shared_memory, *of_row = row + ceil_div(C, 4) * 4; // mean, 1 / deviation
    load_row(job.x + start, C, row);
    if (threadIdx.x < WARP) {
        float2 statistics = row_statistics(row, C, job.ln.epsilon);
        if (lane == 0)
            of_row[0] = statistics.x, of_row[1] = statistics.y;
    }
    sync_block();
    float mean = of_row[0], per_deviation = of_row[1];
    for (int c = threadIdx.x; c < C; c += blockDim.x)
        job.y[start + c] =
            multiply_add((row[c] - mean) * per_deviation, job.ln.weight[c], job.ln.bias[c]);
}

// total = x + y. grid: any; block: any; no shared memory.
KERNEL add(const struct add job)
{
    int64_t threads = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < job.n; i += threads)
        job.total[i] = job.x[i] + job.y[i];
}

// y = e^x, and y = activation(x). grid: any; block: any; no shared memory.
KERNEL exponentials(const struct elementwise job)
{
    int64_t threads = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < job.n; i += threads)
        job.y[i] = exp_of(job.x[i]);
}

KERNEL activations(const struct elementwise job)
{
    int64_t threads = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < job.n; i += threads)
        job.y[i] = activate(job.x[i], job.activation);
}

#if FORMAT == 3

// Return the largest number of the block, at least 0, to all threads. `shared` holds one per warp.
DEVICE int32_t block_largest(int32_t number, int32_t *shared)
{
    UNROLLED for (int lanes = WARP / 2; lanes; lanes /= 2)
        number = larger(number, exchange(number, lanes));
    if (threadIdx.x % WARP == 0)
        shared[threadIdx.x / WARP] = number;
    sync_block();
    for (int warp = 0; warp < (int)blockDim.x / WARP; warp++)
        number = larger(number, shared[warp]);
    return number;
}

// Round rows of x (rows, n_in) to integers from -32639 to 32639, times a step. The step is infinite or
// NaN if an element of the row is.
//
// grid: rows; block: whole warps; shared memory: 4 bytes a warp. A block computes a row.
KERNEL round_rows(const struct linear job)
{
    int64_t row = blockIdx.x, n_in = job.w.n_in, units = job.w.units;
    const float *x = job.x + row * n_in;
    int32_t bits = 0; // of |x|, which compare as the floats do, and keep NaN
    for (int64_t i = threadIdx.x; i < n_in; i += blockDim.x)
        bits = larger(bits, bits_of(absolute(x[i])));
    float size = float_of(block_largest(bits, (int32_t *)shared_memory));
    bool finite = size < INFINITY; // else 0 times this step is NaN, and so are the results
    float per_step = LARGEST_ACTIVATION / (size < SMALLEST_SIZE ? SMALLEST_SIZE : size);
    struct digits *to = (struct digits *)job.digits + row * units;
    for (int64_t i = threadIdx.x; i < units * GROUP; i += blockDim.x) {
        float number = finite && i < n_in ? x[i] : 0.0f;
        int32_t whole = bits_of(multiply_add(number, finite ? per_step : 0.0f, ROUNDER)) - bits_of(ROUNDER);
        int32_t low = ((whole + 128) & 255) - 128;
        to[i / GROUP].high[i % GROUP] = (int8_t)((whole - low) >> 8);
        to[i / GROUP].low[i % GROUP] = (int8_t)low;
    }
    if (threadIdx.x == 0)
        job.steps[row] = finite ? size / LARGEST_ACTIVATION : size;
}

#endif
