// The next tokens of rows of logits, for passes whose operations run one by one. See sampling.cu.

// Return whether a row has no infinite logit and no NaN, and no difference to another such row that is
// infinite. `scan_row` has returned the largest.
DEVICE bool are_finite(float largest)
{
    bool so = row_at(0)->is_finite && largest < LARGEST_LOGIT;
    UNROLLED for (int i = 0; i < ROW_WARPS; i++)
        so = so && row_at(0)->least[i] > -LARGEST_LOGIT;
    return so;
}

// Set the logits of tokens that may not be chosen to -INFINITY, and scan the row again.
DEVICE void ban_tokens(float *logits, const struct next_tokens &job)
{
    if (!job.banned_count)
        return;
    for (int64_t i = threadIdx.x; i < job.banned_count; i += ROW_THREADS)
        logits[job.banned[i]] = -INFINITY;
    sync_row();
    scan_row(logits, job.n, 0);
    sync_row();
}

// grid: rows; block: ROW_THREADS; shared memory: `struct row_memory`, and a number for each span.
KERNEL next_tokens(const struct next_tokens job)
{
    int64_t row = blockIdx.x;
    float *logits = job.logits + row * job.n;
    float largest = scan_row(logits, job.n, 0);
    if (threadIdx.x == 0 && !are_finite(largest))
        job.is_finite[row] = 0;
    double normalizer = row_normalizer(logits, job.n, largest, 0);
    ban_tokens(logits, job);
    choice how = {job.top_k, job.top_p, job.temperature, job.log_min_p};
    float *scratch = job.scratch + row * CHOICE_ARRAYS * job.scratch_size;
    int32_t id = choose_token(
        logits, job.n, how, job.uniforms[row], scratch, job.scratch_size, 0);
    if (threadIdx.x == 0) {
        job.ids[row] = id;
        job.logprobs[row] = load_fresh(logits + id) - normalizer;
    }
}
