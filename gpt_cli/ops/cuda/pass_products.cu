// The products of a pass: their x, biases and residuals, and where the results go.

// A product of all rows: its number, its matrix, and where x comes from and the results go.
struct work {
    int product;
    matrix w;
    const float *bias, *x; // a bias or NULL
    const float *residual; // (rows, n_out), or NULL
    float *y;              // (rows, n_out)
    int activation;
};

DEVICE struct work work_of(int number)
{
    int product = number % PRODUCTS;
    if (number == PRODUCTS * job.n_layer)
        return {LM_HEAD, job.lm_head, job.lm_head_bias, job.x, 0, job.logits, NONE};
    const layer &of = layers_of()[number / PRODUCTS];
    const matrix &w = (&of.c_attn)[product];
    const float *bias = (&of.c_attn_bias)[product];
    if (product == C_ATTN)
        return {product, w, bias, job.x, 0, job.qkv, NONE};
    if (product == ATTN_C_PROJ)
        return {product, w, bias, job.z, job.x, job.mid, NONE};
    if (product == C_FC)
        return {product, w, bias, job.mid, 0, job.hidden, of.activation};
    return {product, w, bias, job.hidden, job.mid, job.x, NONE};
}

// Return the bias of the next panel of this warp, which `copy_biases` has copied.
DEVICE float copied_bias()
{
    return shared_at<float>(divide().biases)[threadIdx.x / WARP * PANEL + threadIdx.x % PANEL];
}

// Begin to copy the biases of a panel for this warp, by two lanes; zeros where there is none.
DEVICE void copy_biases(const struct work &work, int panel)
{
    int lane = threadIdx.x % WARP, n = panel * PANEL + 4 * lane, n_out = work.w.n_out;
    float *to = shared_at<float>(divide().biases) + threadIdx.x / WARP * PANEL + 4 * lane;
    if (lane < PANEL / 4) {
        if (work.bias && n + 4 <= n_out)
            copy16(to, work.bias + n);
        else
            for (int i = 0; i < 4; i++)
                to[i] = work.bias && n + i < n_out ? work.bias[n + i] : 0.0f;
    }
    commit_copies();
}

// Return whether a layer norm is before a product.
DEVICE bool is_normalized(int product)
{
    return product == C_ATTN || product == C_FC || product == LM_HEAD;
}

// Return whether x of a product is in shared memory as a whole: if it is normalized, or short.
DEVICE bool is_in_memory(const struct work &work)
{
    return FORMAT == 3 || is_normalized(work.product) || work.w.units * ROW_UNIT <= job.chunk;
}

// Add the products of a panel, with x in shared memory as a whole or in chunks. The next chunk is copied
// while one is used. Warps without a panel copy, too.
DEVICE void add_products(chains &all, const struct work &work, ring &from, bool has_panel)
{
    int units = work.w.units;
#if FORMAT != 3
    int rows = rows_of_pass(), K = units * ROW_UNIT, rest = divide().rest;
    int chunk = is_in_memory(work) ? K : (int)job.chunk, stride = chunk + PADDING;
    int turn_bytes = rows * stride * (int)sizeof(float);
    if (!is_in_memory(work)) {
        sync_computing(); // all have used what was there before
        copy_rows(work.x, work.w.n_in, 0, chunk, rest, stride);
        for (int k = 0, at = rest; k < K; k += chunk, at = 2 * rest + turn_bytes - at) {
            int next = k + chunk, count = smaller(chunk, K - next);
            wait_for_copies<0>();
            sync_computing();
            if (next < K)
                copy_rows(work.x, work.w.n_in, next, count, 2 * rest + turn_bytes - at, stride);
            read_rows(all, at, stride);
            if (has_panel)
                add_panel(all, from, smaller(chunk, K - k) / ROW_UNIT);
        }
        return;
    }
    read_rows(all, rest, stride);
#endif
    if (has_panel)
        add_panel(all, from, units);
}

// Begin to copy the residuals of this warp's panel. Their rows have C numbers, a multiple of 4.
DEVICE void copy_residuals(const struct work &work, int panel)
{
    float *to = shared_at<float>(divide().residuals) + threadIdx.x / WARP * ROWS * PANEL;
    for (int i = threadIdx.x % WARP; i < rows_of_pass() * (PANEL / 4); i += WARP) {
        int row = i / (PANEL / 4), column = i % (PANEL / 4) * 4, n = panel * PANEL + column;
        if (work.residual && n < work.w.n_out)
            copy16(to + row * PANEL + column, work.residual + row * work.w.n_out + n);
    }
    commit_copies();
}

// Return the residual of result number i of this lane.
DEVICE float copied_residual(int i)
{
    int row = 4 * i + threadIdx.x % WARP / PANEL, column = threadIdx.x % PANEL;
    return shared_at<float>(divide().residuals)[(threadIdx.x / WARP * ROWS + row) * PANEL + column];
}

ROUTINE float activated(float x, int activation) { return activate(x, activation); }

// Compute a product, a panel a warp at a time.
DEVICE void multiply(const struct work &work, ring &from)
{
    int lane = threadIdx.x % WARP, units = work.w.units, n_out = work.w.n_out;
    int panel = threadIdx.x / WARP * gridDim.x + blockIdx.x, apart = PASS_WARPS * gridDim.x;
    for (int first = blockIdx.x; first * PANEL < n_out; first += apart, panel += apart) {
        bool has_panel = panel * PANEL < n_out;
        chains all;
        sync_warp(); // all have read the residuals before, and the biases are there
        float bias = copied_bias();
        start_chains(all, units, bias);
        sync_warp();
        copy_residuals(work, panel);
        if ((first + apart) * PANEL < n_out)
            copy_biases(work, panel + apart);
        add_products(all, work, from, has_panel);
        wait_for_copies<0>();
        sync_warp();
        UNROLLED for (int i = 0; i < RESULTS; i++) {
            int row = 4 * i + lane / PANEL, n = panel * PANEL + lane % PANEL;
            float y = result_of(all, units, i, bias);
            if (work.activation != NONE)
                y = activated(y, work.activation);
            if (work.residual)
                y = copied_residual(i) + y;
            if (has_panel && row < rows_of_pass() && n < n_out)
                work.y[(int64_t)row * n_out + n] = y;
        }
    }
}
