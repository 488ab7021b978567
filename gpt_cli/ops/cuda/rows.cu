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

// y (C) = (x - mean) / sqrt(variance + epsilon) * weight + bias.
//
// grid: rows / warps of a block; block: whole warps; no shared memory. A warp computes a row. Both
// halves of a warp add the same numbers: lane i and lane i + 16 have partial sum i.
KERNEL layer_norm(const struct layer_norm job)
{
    int64_t C = job.C, row = (int64_t)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    int lane = threadIdx.x % WARP;
    if (row >= job.rows)
        return;
    const float *x = job.x + row * C;
    float sum = 0, squares = 0;
#pragma unroll 16
    for (int64_t i = lane % PARTIAL_SUMS; i < C; i += PARTIAL_SUMS)
        sum += x[i];
    float mean = tree_sum(sum) / (float)C;
#pragma unroll 16
    for (int64_t i = lane % PARTIAL_SUMS; i < C; i += PARTIAL_SUMS) {
        float difference = x[i] - mean;
        squares = multiply_add(difference, difference, squares);
    }
    float per_deviation = 1.0f / sqrtf(tree_sum(squares) / (float)C + job.ln.epsilon);
#pragma unroll 8
    for (int64_t i = lane; i < C; i += WARP)
        job.y[row * C + i] = multiply_add((x[i] - mean) * per_deviation, job.ln.weight[i], job.ln.bias[i]);
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
