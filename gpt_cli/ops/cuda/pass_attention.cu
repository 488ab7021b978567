// The attention of a pass: a block computes a head of a row. Attention of many rows is in attention.cu.

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

// The shared memory of a block for the attention of one head of one row.
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

// The values that a thread copies, in pieces of 16 bytes. The value of a key has `per_key` pieces.
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
    for (int task = blockIdx.x; task < rows_of_pass() * H; task += gridDim.x) {
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
