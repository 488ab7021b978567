// The choice of the next tokens in a pass: the grid scans the logits, and a block a row chooses.

// Set the logits of tokens that may not be chosen to -INFINITY, and the largest of their spans anew.
DEVICE void ban(float *logits, int n, int at)
{
    if (!job.banned_count)
        return;
    for (int i = threadIdx.x; i < job.banned_count; i += ROW_THREADS)
        logits[job.banned[i]] = -INFINITY;
    sync_row();
    for (int i = threadIdx.x; i < job.banned_count; i += ROW_THREADS) {
        int span = job.banned[i] / SPAN;
        float most = -INFINITY;
        for (int c = span * SPAN; c < smaller((span + 1) * SPAN, n); c++)
            most = larger_of(most, load_fresh(logits + c));
        span_maxima(at)[span] = most;
    }
    sync_row();
}

// The index of this half of a warp in the grid, and the number of halves.
DEVICE int half_of_grid()
{
    return (threadIdx.x / WARP * gridDim.x + blockIdx.x) * 2 + threadIdx.x % WARP / 16;
}

DEVICE int halves_of_grid() { return gridDim.x * PASS_WARPS * 2; }

// Write the largest logits of spans of all rows, half a warp a span.
DEVICE void scan_logits()
{
    int n = job.lm_head.n_out, spans = ceil_div(n, (int)SPAN), count = (int)rows_of_pass() * spans;
    int lane = threadIdx.x % WARP, steps = ceil_div(count, halves_of_grid());
    for (int step = 0, half = half_of_grid(); step < steps; step++, half += halves_of_grid()) {
        int row = smaller(half, count - 1) / spans, span = smaller(half, count - 1) % spans;
        const float *logits = job.logits + (int64_t)row * n;
        float x[SPAN / 16], most = -INFINITY;
        bool is_finite = true;
        UNROLLED for (int i = 0; i < SPAN / 16; i++) // beyond the end, the last number
            x[i] = load_fresh(logits + smaller(span * SPAN + i * 16 + lane % 16, n - 1));
        UNROLLED for (int i = 0; i < SPAN / 16; i++) {
            most = larger_of(most, x[i]);
            is_finite = is_finite && absolute(x[i]) < LARGEST_LOGIT;
        }
        UNROLLED for (int lanes = 8; lanes; lanes /= 2)
            most = larger_of(most, exchange(most, lanes));
        if (!is_finite)
            job.is_finite[row] = 0;
        if (lane % 16 == 0 && half < count)
            job.maxima[half] = most;
    }
}

// Return the largest logit of a row to all threads of the block, from those of its spans.
DEVICE float largest_logit(int row)
{
    float *largest = shared_at<float>(divide().rest), most = -INFINITY;
    int spans = ceil_div((int)job.lm_head.n_out, (int)SPAN);
    _Pragma("unroll 4") for (int span = threadIdx.x; span < spans; span += PASS_THREADS)
        most = larger_of(most, load_fresh(job.maxima + row * spans + span));
    most = warp_largest(most);
    sync_computing(); // the numbers of the call before are read
    if (threadIdx.x % WARP == 0)
        largest[threadIdx.x / WARP] = most;
    sync_computing();
    UNROLLED for (int i = 0; i < PASS_WARPS; i++)
        most = larger_of(most, largest[i]);
    return most;
}

// Add exponentials of the logits of all rows, half a warp LOG_SUM_STEP of them: see `row_normalizer`.
DEVICE void sum_logits()
{
    int n = job.lm_head.n_out, steps = ceil_div(n, LOG_SUM_STEP), lane = threadIdx.x % WARP;
    for (int row = 0; row < rows_of_pass(); row++) {
        float most = largest_logit(row);
        for (int half = half_of_grid(); half - lane / 16 < steps; half += halves_of_grid())
            if (half < steps)
                job.sums[((int64_t)row * steps + half) * PARTIAL_SUMS + lane % 16] =
                    step_sum(job.logits + (int64_t)row * n, n, half, most);
    }
}

// Return the normalizer of a row, from the sums of its steps, to all threads of the block.
DEVICE double normalizer_of(int row, float most, int at)
{
    int steps = ceil_div((int)job.lm_head.n_out, LOG_SUM_STEP), lane = threadIdx.x % WARP;
    float *batch = row_at(at)->kept; // and what follows it
    const float *sums = job.sums + (int64_t)row * steps * PARTIAL_SUMS;
    double sum = 0;
    for (int first = 0; first < steps; first += 2 * CANDIDATES / PARTIAL_SUMS) {
        int count = smaller(steps - first, 2 * CANDIDATES / PARTIAL_SUMS);
        sync_row();
        _Pragma("unroll 4") for (int i = threadIdx.x; i < count * PARTIAL_SUMS; i += PASS_THREADS)
            batch[i] = load_fresh(sums + first * PARTIAL_SUMS + i);
        sync_row();
        if (threadIdx.x < WARP)
            _Pragma("unroll 16") for (int i = 0; i < count; i++)
                sum += batch[i * PARTIAL_SUMS + lane % PARTIAL_SUMS];
    }
    return finish_normalizer(sum, most, at);
}

// Choose the next tokens, a row a block at a time, once the whole grid has scanned the logits.
ROUTINE void choose_rows(int step)
{
    int n = job.lm_head.n_out, at = divide().rest, spans = ceil_div(n, (int)SPAN);
    choice how = {job.top_k, job.top_p, job.temperature, job.log_min_p};
    for (int row = blockIdx.x; row < rows_of_pass(); row += gridDim.x) {
        float *logits = job.logits + (int64_t)row * n, most = largest_logit(row);
        sync_computing();
        double normalizer = normalizer_of(row, most, at);
        _Pragma("unroll 4") for (int span = threadIdx.x; span < spans; span += PASS_THREADS)
            span_maxima(at)[span] = load_fresh(job.maxima + row * spans + span);
        sync_row();
        ban(logits, n, at);
        float *masked = job.scratch + row * CHOICE_ARRAYS * job.scratch_size;
        int32_t id = choose_token(logits, n, how, job.uniforms[step * rows_of_pass() + row], masked,
                                  job.scratch_size, at);
        if (threadIdx.x == 0) {
            job.ids[(step + 1) * rows_of_pass() + row] = id;
            job.logprobs[step * rows_of_pass() + row] = load_fresh(logits + id) - normalizer;
        }
    }
}
