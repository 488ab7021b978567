// A pass of the whole model for few rows, or several passes one after the other, as one persistent
// kernel: each step of `block` in model.py, with the bits of the operations one by one.
//
// All blocks of the grid are on the device at once, one per multiprocessor, and wait for one another
// at barriers in global memory. A block has PASS_WARPS warps that compute and one that copies. Each
// computing warp has a ring of stages in shared memory. The order of the weights is known, so the
// copying warp runs ahead, across products and barriers, as far as the rings have room:
//
//     weights in global memory            ring of warp 0            warp 0
//     panel 5 of c_attn    ---copy--->   | stage | stage | ... |   8 columns x up to 4 J rows,
//     panel 5 + 1056, then                                          one chain of multiply-adds each
//     panels of c_proj, c_fc, ...         ring of warp 1            warp 1
//                                        | stage | stage | ... |   ...
//
// A warp that computes never copies: its next multiply-add waits for the one before, 4 cycles, and
// whatever else it does beyond that is lost. The chains are in pass_chains.cu.
//
// A product is preceded by a barrier, since its x comes from all blocks. One pass is, for each layer:
//
//     layer norm, c_attn | attention | c_proj, + x | layer norm, c_fc, activation | c_proj, + x |
//
// then: layer norm, lm_head | scan logits | add exponentials | choose a token; | is a barrier.

// Bring x of a product to shared memory, normalized or rounded.
DEVICE void prepare_x(
    const struct work &work, int number, int step, float epsilon)
{
    int K = work.w.units * ROW_UNIT, stride = K + PADDING;
    bool is_embedding = number == 0 && !job.only_layers, has_norm = is_normalized(work.product);
    if (is_embedding)
        embed_rows(step, stride);
    else if (has_norm || (FORMAT != 3 && is_in_memory(work))) // `multiply` loads chunks
        load_rows(work.x, work.w.n_in, K, stride);
    if (has_norm)
        normalize_rows(epsilon, stride);
#if FORMAT == 3
    round_x(has_norm ? 0 : work.x, work.w.n_in, work.w.units, stride);
#endif
}

// Compute one product, and what is before it: a barrier, attention, a layer norm.
DEVICE void compute(int number, int step, ring &from, uint32_t &target)
{
    struct work work = work_of(number);
    bool has_work = (int64_t)blockIdx.x * PANEL < work.w.n_out;
    float epsilon = norm_before(number).epsilon;
    if (has_work) { // begin with copies that do not depend on other blocks
        copy_biases(work, threadIdx.x / WARP * gridDim.x + blockIdx.x);
        if (is_normalized(work.product))
            load_norm(number);
    }
    if (number || step)
        sync_grid(target);
    if (number % PRODUCTS == ATTN_C_PROJ) {
        attend_rows(number / PRODUCTS, step);
        work = work_of(number); // again, so that it takes no registers in between
        sync_grid(target);
    }
    if (!has_work)
        return;
    wait_for_copies<0>();
    prepare_x(work, number, step, epsilon);
    multiply(work, from);
}

// Initialize shared memory: the barriers and the layers.
DEVICE void begin()
{
    block_memory memory = divide();
    for (int i = threadIdx.x; i < PASS_WARPS * job.stages; i += blockDim.x) {
        init_phases(shared_at<phase_barrier>(memory.full) + i, COPYING_LANES);
        init_phases(shared_at<phase_barrier>(memory.empty) + i, RELEASING_LANES);
    }
    publish_phases();
    for (int i = threadIdx.x; i < job.n_layer * (int)sizeof(layer) / 8; i += blockDim.x)
        shared_at<int64_t>(memory.layers)[i] = ((const int64_t *)job.layers)[i];
    int32_t *places = shared_at<int32_t>(memory.places);
    for (int row = threadIdx.x; row < rows_of_pass(); row += blockDim.x) {
        places[TEXT * ROWS + row] = job.texts[row];
        places[POSITION * ROWS + row] = job.positions[row];
        places[FIRST * ROWS + row] = job.firsts[row];
    }
    sync_block();
}

KERNEL LAUNCH_BOUNDS((COPYING_WARP + 1) * WARP, 1) pass()
{
    block_memory memory = divide();
    int warp = threadIdx.x / WARP, stages = job.stages, first = warp * stages;
    begin();
    if (warp >= PASS_WARPS) {
        if (warp == COPYING_WARP)
            copy_weights();
        return;
    }
    ring from = {memory.full + first * (int)sizeof(phase_barrier),
                 memory.empty + first * (int)sizeof(phase_barrier),
                 memory.rings + first * STAGE_BYTES, stages, 0, 0};
    uint32_t target = 0;
    for (int step = 0; step < job.steps; step++) {
        for (int number = 0; number < products_of(); number++)
            compute(number, step, from, target);
        if (job.only_layers)
            return;
        sync_grid(target);
        scan_logits();
        sync_grid(target);
        sum_logits();
        sync_grid(target);
        choose_rows(step);
    }
}
