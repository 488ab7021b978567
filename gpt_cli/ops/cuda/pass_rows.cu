// The rows of x of a pass in shared memory: copied, embedded, normalized, or rounded to integers.

DEVICE float *row_of(const block_memory &memory, int row, int stride)
{
    return shared_at<float>(memory.rest) + row * stride;
}

// Begin to copy `count` columns of x (rows, K) from `first` on to shared memory, with zeros behind the
// last. `to` is the offset of the first row there.
DEVICE void copy_rows(const float *x, int64_t K, int first, int count, int to, int stride)
{
    for (int row = 0; row < (int)rows_of_pass(); row++) {
        float *row_to = shared_at<float>(to) + row * stride;
        const float *from = x + row * K + first;
        for (int k = 4 * threadIdx.x; k < count; k += 4 * PASS_THREADS) {
            if (first + k < K)
                copy16(row_to + k, from + k);
            else
                *(float4 *)(row_to + k) = make_float4(0, 0, 0, 0);
        }
    }
    commit_copies();
}

// Copy whole rows.
ROUTINE void load_rows(const float *x, int64_t K, int count, int stride)
{
    copy_rows(x, K, 0, count, divide().rest, stride);
    wait_for_copies<0>();
    sync_computing();
}

// Write the embeddings of the tokens of a step to shared memory, and each row of them to job.x by one
// block.
ROUTINE void embed_rows(int step, int stride)
{
    block_memory memory = divide();
    int C = job.C, writers = smaller((int)gridDim.x, ceil_div(3 * C, (int)PANEL)); // blocks with work
    for (int row = 0; row < (int)rows_of_pass(); row++) {
        int64_t id = load_fresh(job.ids + step * rows_of_pass() + row);
        const char *token = panel_of(job.wte, id / PANEL);
        const float *position = job.wpe + (int64_t)(place_of(POSITION, row) + step) * C;
        float *to = row_of(memory, row, stride), *x = job.x + (int64_t)row * C;
        bool is_writer = row % writers == blockIdx.x;
        _Pragma("unroll 4") for (int c = threadIdx.x; c < stride; c += PASS_THREADS) {
            float sum = c < C ? weight_at(token, c, id % PANEL) + position[c] : 0.0f;
            to[c] = sum;
            if (is_writer && c < C)
                x[c] = sum;
        }
    }
    sync_computing();
}

// Normalize the rows in shared memory: a warp computes the sums of a row, all threads the rest.
ROUTINE void normalize_rows(float epsilon, int stride)
{
    block_memory memory = divide();
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, C = job.C, rows = rows_of_pass();
    const float *gain = shared_at<float>(memory.gain), *offset = shared_at<float>(memory.offset);
    float2 *of_rows = (float2 *)row_of(memory, rows, stride); // mean and 1 / deviation
    wait_for_copies<0>(); // of gain and offset, which all see after the next barrier
    for (int row = warp; row < rows; row += PASS_WARPS) {
        const float *x = row_of(memory, row, stride);
        float2 statistics = row_statistics(x, C, epsilon);
        if (lane == 0)
            of_rows[row] = statistics;
    }
    sync_computing();
    for (int c = threadIdx.x; c < C; c += PASS_THREADS) {
        float weight = gain[c], bias = offset[c];
        _Pragma("unroll 4") for (int row = 0; row < rows; row++) {
            float *x = row_of(memory, row, stride) + c;
            float2 of_row = of_rows[row];
            *x = multiply_add((*x - of_row.x) * of_row.y, weight, bias);
        }
    }
    sync_computing();
}

// Begin to copy the parameters of the layer norm before a product, which do not depend on other blocks.
// C is a multiple of 4.
ROUTINE void load_norm(int number)
{
    struct norm ln = norm_before(number);
    block_memory memory = divide();
    float *gain = shared_at<float>(memory.gain), *offset = shared_at<float>(memory.offset);
    for (int c = 4 * threadIdx.x; c < job.C; c += 4 * PASS_THREADS) {
        copy16(gain + c, ln.weight + c);
        copy16(offset + c, ln.bias + c);
    }
    commit_copies();
}

#if FORMAT == 3

// Return the offset of digits (rows, units) behind the rows of C columns, and of the steps of the rows.
DEVICE int digits_at()
{
    int stride = ceil_div((int)job.C, (int)ROW_UNIT) * ROW_UNIT + PADDING;
    return divide().rest + ((int)rows_of_pass() + 1) * stride * (int)sizeof(float);
}

DEVICE int steps_at(int units)
{
    return digits_at() + (int)rows_of_pass() * units * (int)sizeof(digits);
}

// Round four elements to integers from -32639 to 32639, in steps.
DEVICE void round_four(float4 x, float per_step, digits *to, int first)
{
    uint32_t high = 0, low = 0;
    UNROLLED for (int i = 0; i < 4; i++) {
        int32_t whole = bits_of(multiply_add((&x.x)[i], per_step, ROUNDER)) - bits_of(ROUNDER);
        int32_t lower = ((whole + 128) & 255) - 128;
        low |= (uint32_t)(lower & 255) << 8 * i;
        high |= (uint32_t)((whole - lower) >> 8 & 255) << 8 * i;
    }
    *(uint32_t *)(to->high + first) = high;
    *(uint32_t *)(to->low + first) = low;
}

// Return four elements of a row: from shared memory, or from `x` (rows, K), with zeros behind the last.
DEVICE float4 four_of(const float *x, int64_t K, int row, int k, int stride)
{
    if (!x)
        return *(const float4 *)(row_of(divide(), row, stride) + k);
    return k < K ? load_fresh((const float4 *)(x + row * K + k)) : make_float4(0, 0, 0, 0);
}

// Return the largest |x| of a thread's elements of a row, as bits, which compare as floats do and keep
// NaN.
DEVICE int32_t largest_size(float4 x, int32_t most)
{
    UNROLLED for (int i = 0; i < 4; i++)
        most = larger(most, bits_of(absolute((&x.x)[i])));
    return most;
}

// Round rows to digits: see `round_row` in native/int8.h. `x` is NULL for the rows in shared memory. A
// thread has every fourth number from 4 * its own on; of a single row, it keeps up to FOURS of them.
ROUTINE void round_x(const float *x, int64_t K, int units, int stride)
{
    const int FOURS = 4, APART = 4 * PASS_THREADS;
    digits *to = shared_at<digits>(digits_at());
    int rows = rows_of_pass(), warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, k_end = units * GROUP;
    float *steps = shared_at<float>(steps_at(units)), *largest = steps + rows;
    bool is_kept = rows == 1 && k_end <= FOURS * APART;
    float4 kept[FOURS];
    for (int row = 0; row < rows; row++) {
        int32_t most = 0;
        if (is_kept) {
            UNROLLED for (int i = 0; i < FOURS; i++) { // all loads at once
                int k = 4 * threadIdx.x + i * APART;
                kept[i] = k < k_end ? four_of(x, K, 0, k, stride) : make_float4(0, 0, 0, 0);
            }
            UNROLLED for (int i = 0; i < FOURS; i++)
                most = largest_size(kept[i], most);
        } else
            for (int k = 4 * threadIdx.x; k < k_end; k += APART)
                most = largest_size(four_of(x, K, row, k, stride), most);
        UNROLLED for (int lanes = WARP / 2; lanes; lanes /= 2)
            most = larger(most, exchange(most, lanes));
        if (lane == 0)
            largest[row * PASS_WARPS + warp] = float_of(most);
    }
    sync_computing();
    for (int row = 0; row < rows; row++) {
        int32_t most = 0;
        UNROLLED for (int i = 0; i < PASS_WARPS; i++)
            most = larger(most, bits_of(largest[row * PASS_WARPS + i]));
        float size = float_of(most);
        bool is_finite = size < INFINITY; // 0 times another step is NaN, and so are the results
        float per_step = LARGEST_ACTIVATION / (size < SMALLEST_SIZE ? SMALLEST_SIZE : size);
        UNROLLED for (int i = 0; i < FOURS; i++) {
            int k = 4 * threadIdx.x + i * APART;
            if (is_kept && k < k_end)
                round_four(is_finite ? kept[i] : make_float4(0, 0, 0, 0), per_step, to + k / GROUP, k % GROUP);
        }
        for (int k = 4 * threadIdx.x; k < k_end && !is_kept; k += APART) {
            float4 four = make_float4(0, 0, 0, 0);
            if (is_finite)
                four = four_of(x, K, row, k, stride);
            round_four(four, per_step, to + row * units + k / GROUP, k % GROUP);
        }
        if (threadIdx.x == 0)
            steps[row] = is_finite ? size / LARGEST_ACTIVATION : size;
    }
    sync_computing();
}

#endif
