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
// whatever else it does beyond that is lost. Lane l computes column l % 8 of a panel. In float, it
// has the rows l / 8, l / 8 + 4, ... In int8, the lanes l, l + 8, l + 16 and l + 24 add a
// quarter of a group of all rows, and exchange their sums, which are integers and exact.

#ifndef ROWS
#define ROWS 4 // at most, of a pass
#endif

enum {
    PASS_WARPS = 8,    // that compute
    COPYING_WARP = 11, // beside the warps 3 and 7, which often have no panel: 8, 9, 10 do nothing
    PASS_THREADS = PASS_WARPS * WARP,
    STAGE_UNITS = 4096 / UNIT_BYTES, // units of a panel in a stage: 4, 8 or 7
    STAGE_BYTES = STAGE_UNITS * UNIT_BYTES,
    PRODUCTS = 4, // of a layer, in the order of `struct layer`
    PLACES = 3,   // arrays of integers about rows
    PADDING = 4,  // floats between rows in shared memory: they begin at different banks
    RESULTS = (ROWS + 3) / 4, // of a lane: of rows l / 8, l / 8 + 4, ...
    TILE_KEYS = 32, // whose values are copied together
    TILES = 6,      // of values in shared memory
};

CONSTANT struct pass job; // that this launch computes

enum product { C_ATTN, ATTN_C_PROJ, C_FC, MLP_C_PROJ, LM_HEAD };

// --- shared memory -------------------------------------------------------------------------------

// Offsets of what a block has in shared memory.
struct block_memory {
    int full, empty; // barriers (PASS_WARPS, stages)
    int rings;       // (PASS_WARPS, stages, STAGE_BYTES)
    int layers;
    int gain, offset; // (C,) of the next layer norm
    int biases;       // (PASS_WARPS, PANEL) of the next panels
    int residuals;    // (PASS_WARPS, ROWS, PANEL) of a panel
    int places;       // (PLACES, ROWS): texts, positions, firsts
    int rest;         // x of some rows and columns, digits, or what attention and choice need
};

DEVICE block_memory divide()
{
    block_memory at;
    int count = PASS_WARPS * (int)job.stages, width = ceil_div((int)job.C, 4) * 16;
    at.full = 0;
    at.empty = count * sizeof(phase_barrier);
    at.rings = ceil_div(2 * at.empty, 128) * 128;
    at.layers = at.rings + count * STAGE_BYTES;
    at.gain = at.layers + ceil_div((int)job.n_layer * (int)sizeof(layer), 16) * 16;
    at.offset = at.gain + width;
    at.biases = at.offset + width;
    at.residuals = at.biases + PASS_WARPS * PANEL * (int)sizeof(float);
    at.places = at.residuals + PASS_WARPS * ROWS * PANEL * (int)sizeof(float);
    at.rest = at.places + ceil_div(PLACES * ROWS, 4) * 16;
    return at;
}

DEVICE const layer *layers_of()
{
    return shared_at<layer>(divide().layers);
}

// The matrix of a product: number 4 L + P is product P of layer L, and the last one is the head.
DEVICE matrix matrix_of(int number)
{
    if (number == PRODUCTS * job.n_layer)
        return job.lm_head;
    return (&layers_of()[number / PRODUCTS].c_attn)[number % PRODUCTS];
}

DEVICE int products_of()
{
    return PRODUCTS * (int)job.n_layer + (job.only_layers ? 0 : 1);
}

// --- the warp that copies ------------------------------------------------------------------------

// The next weights of one computing warp, in the order of use.
struct stream {
    const char *from;
    int step, product, panel, units; // where they are, and the units that are left of their panel
    int slot;                        // of the ring, where they go
    uint32_t parity;                 // of the phase that ends when this slot is free
};

// Find the next product that has the panel of this number. Behind the last one, no units are left.
DEVICE void find_panel(stream &next, int first)
{
    while (next.step < job.steps) {
        matrix w = matrix_of(next.product);
        if ((int64_t)next.panel * PANEL < w.n_out) {
            next.from = panel_of(w, next.panel);
            next.units = w.units;
            return;
        }
        next.panel = first;
        if (++next.product == products_of())
            next.product = 0, next.step++;
    }
    next.units = 0;
}

// Go on behind a stage that is being copied.
DEVICE void advance(stream &next, int units, int first)
{
    if (++next.slot == job.stages)
        next.slot = 0, next.parity ^= 1;
    next.from += units * UNIT_BYTES;
    next.units -= units;
    if (!next.units) {
        next.panel += PASS_WARPS * gridDim.x;
        find_panel(next, first);
    }
}

// Fill the rings of all computing warps, each by a lane, until all weights are copied. It never waits
// long: a stage that is free is filled within some 200 cycles.
ROUTINE void copy_weights()
{
    int lane = threadIdx.x % WARP, warp = smaller(lane, PASS_WARPS - 1), first = warp * gridDim.x + blockIdx.x;
    phase_barrier *full = shared_at<phase_barrier>(divide().full) + warp * job.stages;
    phase_barrier *empty = shared_at<phase_barrier>(divide().empty) + warp * job.stages;
    int ring = divide().rings + warp * (int)job.stages * STAGE_BYTES;
    stream next = {};
    next.panel = first;
    next.parity = 1; // the phase before the first one has ended
    if (lane < PASS_WARPS)
        find_panel(next, first);
    while (vote(next.units != 0)) {
        bool is_ready = next.units && has_ended(empty + next.slot, next.parity);
        int units = smaller(next.units, (int)STAGE_UNITS), to = ring + next.slot * STAGE_BYTES;
        if (COPYING_LANES == 1) {
            if (is_ready)
                copy_range(shared_at<char>(to), next.from, units * UNIT_BYTES, full + next.slot);
        } else {
            uint32_t ready = vote(is_ready);
            for (int i = 0; i < PASS_WARPS; i++) {
                const char *from = (const char *)from_lane((int64_t)next.from, i);
                int slot = from_lane(next.slot, i), bytes = from_lane(units, i) * UNIT_BYTES;
                char *stage = shared_at<char>(from_lane(to, i));
                phase_barrier *barrier = shared_at<phase_barrier>(divide().full) + i * job.stages + slot;
                if (ready >> i & 1)
                    copy_range(stage, from, bytes, barrier);
            }
        }
        if (is_ready)
            advance(next, units, first);
    }
}

// --- the warps that compute ----------------------------------------------------------------------

DEVICE void sync_computing() { sync_threads(1, PASS_THREADS); }

// Wait for all blocks of the grid. `target` is the counter's value at which they have arrived.
DEVICE void sync_grid(uint32_t &target)
{
    sync_computing();
    if (threadIdx.x == 0) {
        target += gridDim.x;
        add_released(job.barrier, 1);
        while ((int32_t)(load_acquired(job.barrier) - target) < 0)
            ;
    }
    sync_computing();
}

// The ring of a computing warp: offsets in shared memory, and the stage that it reads.
struct ring {
    int full, empty, stages;
    int count, slot;
    uint32_t parity; // of the phase in which the stage is filled
};

DEVICE phase_barrier *full_of(const ring &from)
{
    return shared_at<phase_barrier>(from.full) + from.slot;
}

DEVICE void wait_for(const ring &from)
{
    while (!has_ended(full_of(from), from.parity))
        ;
}

DEVICE int stage_of(const ring &from) { return from.stages + from.slot * STAGE_BYTES; }

// Go on to the next stage.
DEVICE void advance(ring &from)
{
    if (++from.slot == from.count)
        from.slot = 0, from.parity ^= 1;
}

// The offset of the barrier by which the stage is given back.
DEVICE int empty_of(const ring &from) { return from.empty + from.slot * (int)sizeof(phase_barrier); }

// Give back a stage that this warp has read, by its barrier; none if that is -1.
DEVICE void release_stage(int barrier)
{
    sync_warp();
    if (threadIdx.x % WARP == 0 && barrier >= 0)
        arrive(shared_at<phase_barrier>(barrier));
}

#if FORMAT != 3

// The chains of a lane in float: one column of a panel and every fourth row of x.
struct chains {
    static const int J = RESULTS;
    static const int AHEAD = J > 2 || ROWS_PER_LOAD == 8 ? 2 : 4; // loads before their use
    float sums[J];
    float4 weights[AHEAD]; // the bits, as stored
    float4 x[J][AHEAD][ROWS_PER_LOAD / 4];
    int rows[J]; // offsets of x
};

// Return weight i of 16 loaded bytes.
DEVICE float loaded_weight(const float4 &bits, int i)
{
#if FORMAT == 0
    return (&bits.x)[i];
#else
    uint32_t two = (uint32_t)bits_of((&bits.x)[i / 2]);
    uint16_t one = i % 2 ? two >> 16 : two & 0xffff;
    return FORMAT == 1 ? widen_bfloat16(one) : widen_float16(one);
#endif
}

DEVICE void load_next(chains &all, int at, int w, int k)
{
    all.weights[at] = *shared_at<float4>(w);
    UNROLLED for (int j = 0; j < chains::J; j++)
        UNROLLED for (int i = 0; i < ROWS_PER_LOAD / 4; i++)
            all.x[j][at][i] = *shared_at<float4>(all.rows[j] + 4 * k + 16 * i);
}

// Add `UNITS` units of a panel to the chains. The first loads are done already; the last ones are of
// the units that follow, at w_next and k_next. If `waits`, these are in the next stage. `read` is the
// barrier of a stage that has been read, or -1: it is given back between two multiply-adds.
template <int UNITS> DEVICE void add_units(
    chains &all, int w, int k, int w_next, int k_next, bool waits, const ring &next, int read)
{
    const int J = chains::J, AHEAD = chains::AHEAD, LOADS = UNITS * ROW_UNIT / ROWS_PER_LOAD;
    bool is_there = true;
    UNROLLED for (int i = 0; i < LOADS; i++) {
        if (i == AHEAD - 1)
            release_stage(read);
        if (waits && i == (LOADS - AHEAD) / 2)
            is_there = has_ended(full_of(next), next.parity);
        if (waits && i == LOADS - AHEAD && !is_there)
            wait_for(next);
        float4 weights = all.weights[i % AHEAD], x[J][ROWS_PER_LOAD / 4];
        UNROLLED for (int j = 0; j < J; j++)
            UNROLLED for (int h = 0; h < ROWS_PER_LOAD / 4; h++)
                x[j][h] = all.x[j][i % AHEAD][h];
        bool is_inside = i + AHEAD < LOADS;
        int load = is_inside ? i + AHEAD : i + AHEAD - LOADS;
        load_next(all, i % AHEAD, (is_inside ? w : w_next) + load * 16 * PANEL,
                  (is_inside ? k : k_next) + load * ROWS_PER_LOAD);
        UNROLLED for (int r = 0; r < ROWS_PER_LOAD; r++)
            UNROLLED for (int j = 0; j < J; j++)
                all.sums[j] =
                    multiply_add((&x[j][r / 4].x)[r % 4], loaded_weight(weights, r), all.sums[j]);
    }
}

// Add a range of units of a panel, from the ring, with their x in shared memory.
DEVICE void add_panel(chains &all, ring &ring_of_warp, int units)
{
    ring from = ring_of_warp;
    int column = threadIdx.x % PANEL * 16, k = 0, read = -1;
    wait_for(from);
    int w = stage_of(from) + column;
    UNROLLED for (int i = 0; i < chains::AHEAD; i++)
        load_next(all, i, w + i * 16 * PANEL, i * ROWS_PER_LOAD);
    for (; units >= STAGE_UNITS; units -= STAGE_UNITS) {
        ring next = from;
        advance(next);
        bool is_last = units == STAGE_UNITS;
        int w_next = is_last ? w : stage_of(next) + column;
        int k_next = is_last ? 0 : k + STAGE_UNITS * ROW_UNIT;
        add_units<STAGE_UNITS>(all, w, k, w_next, k_next, !is_last, next, read);
        read = empty_of(from);
        from = next, w = w_next, k = k_next;
    }
    for (int left = units; left; left--) { // a stage that is not full
        int w_next = left == 1 ? w : w + UNIT_BYTES, k_next = left == 1 ? 0 : k + ROW_UNIT;
        add_units<1>(all, w, k, w_next, k_next, false, from, read);
        w = w_next, k = k_next, read = -1;
    }
    release_stage(read);
    if (units) {
        release_stage(empty_of(from));
        advance(from);
    }
    ring_of_warp = from;
}

#else

// Return the sum of the products of 16 int8 weights with 16 digits.
DEVICE int32_t dot16(int4 weights, int4 digits)
{
    int32_t sum = dot4(weights.x, digits.x, 0);
    sum = dot4(weights.y, digits.y, sum);
    sum = dot4(weights.z, digits.z, sum);
    return dot4(weights.w, digits.w, sum);
}

// The chains of a lane in int8: one column of a panel and all rows of x.
struct chains {
    float sums[ROWS];
    int rows[ROWS]; // offsets of digits
};

// Add a range of units of a panel: groups, whose sums are integers.
DEVICE void add_panel(chains &all, ring &from, int units)
{
    int lane = threadIdx.x % WARP, quarter = lane / PANEL;
    for (int first = 0; first < units; first += STAGE_UNITS) {
        int count = smaller(units - first, (int)STAGE_UNITS);
        wait_for(from);
        const int8_group *groups = shared_at<int8_group>(stage_of(from));
        _Pragma("unroll 4") for (int i = 0; i < count; i++) {
            int4 weights = *(const int4 *)groups[i].weights[quarter][lane % PANEL];
            float scale = widen_bfloat16(groups[i].scales[lane % PANEL]);
            UNROLLED for (int j = 0; j < ROWS; j++) {
                const digits *x = shared_at<digits>(all.rows[j]) + first + i;
                int32_t high = dot16(weights, *(const int4 *)(x->high + 16 * quarter));
                int32_t low = dot16(weights, *(const int4 *)(x->low + 16 * quarter));
                int32_t sum = (int32_t)((uint32_t)high << 8) + low;
                sum += exchange(sum, PANEL);
                sum += exchange(sum, 2 * PANEL);
                all.sums[j] = multiply_add((float)sum, scale, all.sums[j]);
            }
        }
        release_stage(empty_of(from));
        advance(from);
    }
}

#endif

// What is known about a row: its row of the cache, its position, and the first row of its text.
enum place { TEXT, POSITION, FIRST };

DEVICE int place_of(int place, int row)
{
    return shared_at<int32_t>(divide().places)[place * ROWS + row];
}

// --- x in shared memory --------------------------------------------------------------------------

DEVICE float *row_of(const block_memory &memory, int row, int stride)
{
    return shared_at<float>(memory.rest) + row * stride;
}

// Begin to copy `count` columns of x (rows, K) from `first` on to shared memory, with zeros behind the
// last. `to` is the offset of the first row there.
DEVICE void copy_rows(const float *x, int64_t K, int first, int count, int to, int stride)
{
    for (int row = 0; row < (int)job.rows; row++) {
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
    for (int row = 0; row < (int)job.rows; row++) {
        int64_t id = load_fresh(job.ids + step * job.rows + row);
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
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, C = job.C, rows = job.rows;
    const float *gain = shared_at<float>(memory.gain), *offset = shared_at<float>(memory.offset);
    float2 *of_rows = (float2 *)row_of(memory, rows, stride); // mean and 1 / deviation
    wait_for_copies<0>(); // of gain and offset, which all see after the next barrier
    for (int row = warp; row < rows; row += PASS_WARPS) {
        const float *x = row_of(memory, row, stride);
        float sum = 0, squares = 0;
        _Pragma("unroll 16") for (int c = lane % PARTIAL_SUMS; c < C; c += PARTIAL_SUMS)
            sum += x[c];
        float mean = tree_sum(sum) / (float)C;
        _Pragma("unroll 16") for (int c = lane % PARTIAL_SUMS; c < C; c += PARTIAL_SUMS) {
            float difference = x[c] - mean;
            squares = multiply_add(difference, difference, squares);
        }
        float per_deviation = 1.0f / sqrtf(tree_sum(squares) / (float)C + epsilon);
        if (lane == 0)
            of_rows[row] = make_float2(mean, per_deviation);
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

// Begin to copy the parameters of a layer norm, which do not depend on other blocks. C is a multiple of 4.
DEVICE void load_norm(const struct norm &ln)
{
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
    return divide().rest + ((int)job.rows + 1) * stride * (int)sizeof(float);
}

DEVICE int steps_at(int units)
{
    return digits_at() + (int)job.rows * units * (int)sizeof(digits);
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

// Round rows to digits: see `round_row` in native/int8.h. `x` is NULL for the rows in shared memory.
ROUTINE void round_x(const float *x, int64_t K, int units, int stride)
{
    digits *to = shared_at<digits>(digits_at());
    int rows = job.rows, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float *steps = shared_at<float>(steps_at(units)), *largest = steps + rows;
    for (int row = 0; row < rows; row++) {
        int32_t most = 0; // bits of |x|, which compare as the floats do, and keep NaN
        for (int k = 4 * threadIdx.x; k < units * GROUP; k += 4 * PASS_THREADS) {
            float4 four = four_of(x, K, row, k, stride);
            UNROLLED for (int i = 0; i < 4; i++)
                most = larger(most, bits_of(absolute((&four.x)[i])));
        }
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
        for (int k = 4 * threadIdx.x; k < units * GROUP; k += 4 * PASS_THREADS) {
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

// --- products ------------------------------------------------------------------------------------

#if FORMAT == 3

// Begin the chains of a panel: at 0, since the bias is added last.
DEVICE void start_chains(
    chains &all, int units, float bias)
{
    UNROLLED for (int j = 0; j < ROWS; j++) {
        all.sums[j] = 0;
        all.rows[j] = digits_at() + (j < job.rows ? j : 0) * units * (int)sizeof(digits);
    }
}

// Return a lane's result number i: of row 4 i + lane / PANEL.
DEVICE float result_of(
    const chains &all, int units, int i, float bias)
{
    int quarter = threadIdx.x % WARP / PANEL, row = 4 * i + quarter;
    const float *steps = shared_at<float>(steps_at(units));
    float sum = all.sums[4 * i];
    UNROLLED for (int j = 4 * i + 1; j < 4 * i + 4; j++)
        if (j < ROWS)
            sum = j == row ? all.sums[j] : sum;
    return multiply_add(sum, steps[row < job.rows ? row : 0], bias);
}

#else

// Begin the chains of a panel at the bias.
DEVICE void start_chains(
    chains &all, int units, float bias)
{
    UNROLLED for (int j = 0; j < chains::J; j++)
        all.sums[j] = bias;
}

// Let the chains read rows of x from an offset in shared memory.
DEVICE void read_rows(chains &all, int from, int stride)
{
    int quarter = threadIdx.x % WARP / PANEL;
    UNROLLED for (int j = 0; j < chains::J; j++) {
        int row = 4 * j + quarter;
        all.rows[j] = from + (row < job.rows ? row : 0) * stride * (int)sizeof(float);
    }
}

DEVICE float result_of(
    const chains &all, int units, int i, float bias)
{
    return all.sums[i];
}

#endif

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

// Add the products of a panel, with x in shared memory as a whole or in chunks: of these, the next one
// is copied while one is used. Warps without a panel copy, too.
DEVICE void add_products(chains &all, const struct work &work, ring &from, bool has_panel)
{
    int units = work.w.units;
#if FORMAT != 3
    int rows = job.rows, K = units * ROW_UNIT, rest = divide().rest;
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

// Begin to copy what is added to the results of this warp's panel. Rows of C numbers, a multiple of 4.
DEVICE void copy_residuals(const struct work &work, int panel)
{
    float *to = shared_at<float>(divide().residuals) + threadIdx.x / WARP * ROWS * PANEL;
    for (int i = threadIdx.x % WARP; i < job.rows * (PANEL / 4); i += WARP) {
        int row = i / (PANEL / 4), column = i % (PANEL / 4) * 4, n = panel * PANEL + column;
        if (work.residual && n < work.w.n_out)
            copy16(to + row * PANEL + column, work.residual + row * work.w.n_out + n);
    }
    commit_copies();
}

// Return what is added to result number i of this lane.
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
            if (has_panel && row < job.rows && n < n_out)
                work.y[(int64_t)row * n_out + n] = y;
        }
    }
}

// --- attention -----------------------------------------------------------------------------------

// A query of a head: its row and the keys that it sees. Keys from `past` on are of tokens of this
// pass, whose row in qkv is firsts + the rest.
struct query {
    const float *qkv; // of this row and head
    cached *keys, *values;
    int past, visible, first;
};

DEVICE query query_of(int layer, int row, int head, int step)
{
    query one;
    int position = place_of(POSITION, row) + step;
    int64_t at = ((int64_t)place_of(TEXT, row) * job.H + head) * job.cache_panels * SLOTS * job.D;
    one.first = place_of(FIRST, row);
    one.visible = position + 1;
    one.past = position - (row - one.first);
    one.qkv = job.qkv + row * 3 * job.C + head * job.D;
    one.keys = job.keys + layer * job.keys_step + at;
    one.values = job.values + layer * job.values_step + at;
    return one;
}

// Return k or v (`part` 1 or 2) of a token of this pass, which is key `s`.
DEVICE const float *of_new_key(const query &one, int s, int head, int part)
{
    return job.qkv + ((one.first + s - one.past) * 3 + part) * job.C + head * job.D;
}

// What a block has in shared memory for the attention of a head of a row.
struct attention {
    float *q, *key; // (D,): of this token
    float *largest; // (PASS_WARPS,), then the sum of the weights
    float *weights; // (capacity,)
    cached *tiles;  // (TILES, TILE_KEYS, D)
};

DEVICE attention divide_rest()
{
    attention of;
    of.q = shared_at<float>(divide().rest);
    of.key = of.q + job.D;
    of.largest = of.key + job.D;
    of.weights = of.largest + 2 * PASS_WARPS;
    of.tiles = (cached *)(of.weights + job.cache_panels * SLOTS);
    return of;
}

// Copy this token's query and key to shared memory.
DEVICE void take_token(const query &one, const attention &of)
{
    int D = job.D, d = threadIdx.x;
    if (d < D) {
        float q = load_fresh(one.qkv + d), key = load_fresh(one.qkv + job.C + d);
        of.q[d] = q;
        of.key[d] = widen(narrow(key));
    }
}

// A number of this token's key and value, which a thread appends to the cache. The last threads do it:
// the first ones have scores to compute, and values to add.
struct appended {
    int d; // negative if this thread appends none
    float key, value;
};

DEVICE appended load_appended(const query &one)
{
    int d = PASS_THREADS - 1 - threadIdx.x;
    if (d >= job.D)
        return {-1, 0, 0};
    return {d, load_fresh(one.qkv + job.C + d), load_fresh(one.qkv + 2 * job.C + d)};
}

DEVICE void append_token(const query &one, const appended &number)
{
    int s = one.visible - 1, D = job.D, d = number.d;
    if (d < 0)
        return;
    one.keys[((int64_t)(s / SLOTS) * D + d) * SLOTS + s % SLOTS] = narrow(number.key);
    one.values[(int64_t)s * D + d] = narrow(number.value);
}

DEVICE const cached *key_at(const query &one, int s)
{
    return one.keys + (int64_t)(s / SLOTS) * SLOTS * job.D + s % SLOTS;
}

// Add COUNT products of q with a key in the cache, whose numbers are SLOTS apart.
template <int COUNT> DEVICE float add_scores(const float *q, const cached *key, float score)
{
    cached numbers[COUNT];
    UNROLLED for (int i = 0; i < COUNT; i++) // all loads at once
        numbers[i] = load_fresh(key + i * SLOTS);
    UNROLLED for (int i = 0; i < COUNT; i++)
        score = multiply_add(q[i], widen(numbers[i]), score);
    return score;
}

// Return q (D) times one key.
DEVICE float score_of(const query &one, const attention &of, int s, int head)
{
    int D = job.D, d = 0;
    float score = 0;
    if (s >= one.past) {
        const float *key = s == one.visible - 1 ? of.key : of_new_key(one, s, head, 1);
        _Pragma("unroll 8") for (; d < D; d++)
            score = multiply_add(of.q[d], widen(narrow(key[d])), score);
        return score;
    }
    const cached *key = key_at(one, s);
    for (; d + 32 <= D; d += 32)
        score = add_scores<32>(of.q + d, key + d * SLOTS, score);
    for (; d < D; d += 8) // a multiple of 8
        score = add_scores<8>(of.q + d, key + d * SLOTS, score);
    return score;
}

// How a thread copies values: pieces of 16 bytes, of which a key has `per_key`.
struct copier {
    int first_key, keys_apart; // first_key is -1 if the thread does not copy
    int d;                     // the first number of its pieces
};

enum { PIECE = 16 / sizeof(cached) };

DEVICE copier copier_of(int adding)
{
    int per_key = (int)job.D / PIECE, thread = threadIdx.x - adding;
    int keys_apart = (PASS_THREADS - adding) / per_key;
    bool copies = thread >= 0 && thread < keys_apart * per_key;
    return {copies ? thread / per_key : -1, keys_apart, thread % per_key * PIECE};
}

// Begin to copy the values of tile number `number` to shared memory.
DEVICE void copy_tile(
    const query &one, const attention &of, int number, int head, const copier &thread)
{
    int D = job.D, start = number * TILE_KEYS, count = smaller((int)TILE_KEYS, one.visible - start);
    cached *tile = of.tiles + number % TILES * TILE_KEYS * D + thread.d;
    for (int i = thread.first_key; i < count && i >= 0; i += thread.keys_apart) {
        int s = start + i;
        if (s < one.past)
            copy16(tile + i * D, one.values + (int64_t)s * D + thread.d);
        else
            for (int j = 0; j < PIECE; j++)
                tile[i * D + j] = narrow(load_fresh(of_new_key(one, s, head, 2) + thread.d + j));
    }
    commit_copies();
}

// Add the products of weights and values of a tile to a column: batches, whose loads are done before
// the multiply-adds of the batch before.
DEVICE float mix_tile(const float *weights, const cached *tile, int count, int D, float mixed)
{
    const int BATCH = 16;
    float value[BATCH];
    float4 weight[BATCH / 4];
    int s = 0;
    for (; s + BATCH <= count; s += BATCH) {
        UNROLLED for (int i = 0; i < BATCH / 4; i++)
            weight[i] = *(const float4 *)(weights + s + 4 * i);
        UNROLLED for (int i = 0; i < BATCH; i++)
            value[i] = widen(tile[(s + i) * D]);
        UNROLLED for (int i = 0; i < BATCH; i++)
            mixed = multiply_add((&weight[i / 4].x)[i % 4], value[i], mixed);
    }
    for (; s < count; s++)
        mixed = multiply_add(weights[s], widen(tile[s * D]), mixed);
    return mixed;
}

// Write the weights of the keys, and their sum, which all see after the next barrier.
DEVICE void weigh_keys(
    const query &one, const attention &of, int head, float scale)
{
    int thread = threadIdx.x, visible = one.visible, lane = thread % WARP;
    float most = -INFINITY, *weights = of.weights;
    for (int s = thread; s < visible; s += PASS_THREADS) {
        float score = score_of(one, of, s, head) * scale;
        weights[s] = score;
        most = larger_of(most, score);
    }
    most = warp_largest(most);
    if (lane == 0)
        of.largest[thread / WARP] = most;
    sync_computing();
    UNROLLED for (int i = 0; i < PASS_WARPS; i++)
        most = larger_of(most, of.largest[i]);
    for (int s = thread; s < visible; s += PASS_THREADS)
        weights[s] = exp_of(weights[s] - most);
    sync_computing();
    if (thread / WARP == PASS_WARPS - 1) {
        float sum = 0;
        _Pragma("unroll 8") for (int s = lane % PARTIAL_SUMS; s < visible; s += PARTIAL_SUMS)
            sum += weights[s];
        sum = tree_sum(sum);
        if (lane == 0)
            of.largest[PASS_WARPS] = sum;
    }
}

// Bring the keys and values of this block's first task from memory to the second-level cache, before
// its query is computed.
ROUTINE void prefetch_cache(int layer, int step)
{
    const int LINE = 128; // bytes
    int task = blockIdx.x, H = job.H, D = job.D;
    if (task >= job.rows * H)
        return;
    query one = query_of(layer, task / H, task % H, step);
    int bytes = ceil_div(one.past, (int)SLOTS) * SLOTS * D * (int)sizeof(cached);
    for (int i = threadIdx.x * LINE; i < bytes; i += PASS_THREADS * LINE) {
        prefetch((const char *)one.keys + i);
        prefetch((const char *)one.values + i);
    }
}

// Attend with all heads of all rows, a head of a row a block at a time. The first warps add values,
// a column a lane; the others copy the next tiles of values meanwhile:
//
//     tile i + 5 in global memory --copy--> | tile i - 1, free | tile i | ... | tile i + 4 |
//                                             the warps that add read ^
ROUTINE void attend_rows(int layer, int step)
{
    int D = job.D, H = job.H, thread = threadIdx.x, adding = ceil_div(D, (int)WARP) * WARP;
    float scale = layers_of()[layer].scale;
    attention of = divide_rest();
    copier copying = copier_of(adding);
    for (int task = blockIdx.x; task < job.rows * H; task += gridDim.x) {
        int row = task / H, head = task % H;
        query one = query_of(layer, row, head, step);
        int tiles = ceil_div(one.visible, (int)TILE_KEYS);
        if (thread >= adding)
            for (int number = 0; number < TILES - 1; number++)
                copy_tile(one, of, number, head, copying); // none behind the last
        appended number = load_appended(one);
        take_token(one, of);
        sync_computing();
        weigh_keys(one, of, head, scale);
        append_token(one, number);
        float mixed = 0;
        for (int number = 0; number < tiles; number++) {
            if (thread >= adding)
                wait_for_copies<TILES - 2>();
            sync_computing(); // all copies of this tile are done, and the tile before is free
            if (thread >= adding)
                copy_tile(one, of, number + TILES - 1, head, copying);
            const cached *tile = of.tiles + number % TILES * TILE_KEYS * D;
            int start = number * TILE_KEYS, count = smaller((int)TILE_KEYS, one.visible - start);
            if (thread < D)
                mixed = mix_tile(of.weights + start, tile + thread, count, D, mixed);
        }
        if (thread < D)
            job.z[row * job.C + head * D + thread] = mixed / of.largest[PASS_WARPS];
        sync_computing(); // all have read what the next task overwrites
    }
}

// --- the pass ------------------------------------------------------------------------------------

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
    int n = job.lm_head.n_out, spans = ceil_div(n, (int)SPAN), count = (int)job.rows * spans;
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
    for (int row = 0; row < job.rows; row++) {
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
    for (int row = blockIdx.x; row < job.rows; row += gridDim.x) {
        float *logits = job.logits + (int64_t)row * n, most = largest_logit(row);
        sync_computing();
        double normalizer = normalizer_of(row, most, at);
        _Pragma("unroll 4") for (int span = threadIdx.x; span < spans; span += PASS_THREADS)
            span_maxima(at)[span] = load_fresh(job.maxima + row * spans + span);
        sync_row();
        ban(logits, n, at);
        float *masked = job.scratch + row * CHOICE_ARRAYS * job.scratch_size;
        int32_t id = choose_token(logits, n, how, job.uniforms[step * job.rows + row], masked,
                                  job.scratch_size, at);
        if (threadIdx.x == 0) {
            job.ids[(step + 1) * job.rows + row] = id;
            job.logprobs[step * job.rows + row] = load_fresh(logits + id) - normalizer;
        }
    }
}

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

// Return the layer norm that is before a product.
DEVICE struct norm norm_before(int number)
{
    if (number == PRODUCTS * job.n_layer)
        return job.ln_f;
    const layer &of = layers_of()[number / PRODUCTS];
    return number % PRODUCTS == C_ATTN ? of.ln_1 : of.ln_2;
}

// Compute one product, and what is before it: a barrier, attention, a layer norm.
DEVICE void compute(int number, int step, ring &from, uint32_t &target)
{
    struct work work = work_of(number);
    bool has_work = (int64_t)blockIdx.x * PANEL < work.w.n_out;
    float epsilon = norm_before(number).epsilon;
    if (has_work) { // what does not depend on other blocks
        copy_biases(work, threadIdx.x / WARP * gridDim.x + blockIdx.x);
        if (is_normalized(work.product))
            load_norm(norm_before(number));
    }
    if (work.product == ATTN_C_PROJ)
        prefetch_cache(number / PRODUCTS, step);
    if (number || step)
        sync_grid(target);
    if (work.product == ATTN_C_PROJ) {
        attend_rows(number / PRODUCTS, step);
        sync_grid(target);
    }
    if (!has_work)
        return;
    wait_for_copies<0>();
    prepare_x(work, number, step, epsilon);
    multiply(work, from);
}

// Fill shared memory with what is there from the beginning: barriers and layers.
DEVICE void begin()
{
    block_memory memory = divide();
    for (int i = threadIdx.x; i < PASS_WARPS * job.stages; i += blockDim.x) {
        init_phases(shared_at<phase_barrier>(memory.full) + i, COPYING_LANES);
        init_phases(shared_at<phase_barrier>(memory.empty) + i, 1);
    }
    publish_phases();
    for (int i = threadIdx.x; i < job.n_layer * (int)sizeof(layer) / 8; i += blockDim.x)
        shared_at<int64_t>(memory.layers)[i] = ((const int64_t *)job.layers)[i];
    int32_t *places = shared_at<int32_t>(memory.places);
    for (int row = threadIdx.x; row < job.rows; row += blockDim.x) {
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
