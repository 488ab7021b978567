// The cache of keys and values, and attention. See kernels.c in ops/native.

// Store the new keys and values.
//
// grid: (B * H, panels of SLOTS new tokens); block: any; no shared memory. Consecutive threads store
// consecutive slots of the keys, and consecutive numbers of the values.
KERNEL store(const struct store job)
{
    int64_t head = blockIdx.x, b = head / job.H, D = job.D, first = (int64_t)blockIdx.y * SLOTS;
    int64_t from = b * job.b_stride + head % job.H * job.h_stride, past = job.past[b];
    cached *keys = job.keys + head * job.cache_panels * SLOTS * D;
    cached *values = job.values + head * job.cache_panels * SLOTS * D;
    int64_t count = smaller(job.lengths[b] - first, (int64_t)SLOTS);
    for (int64_t i = threadIdx.x; i < SLOTS * D; i += blockDim.x) {
        int64_t t = i % SLOTS, d = i / SLOTS, slot = past + first + t;
        if (t < count)
            keys[(slot / SLOTS * D + d) * SLOTS + slot % SLOTS] =
                narrow(job.k[from + (first + t) * job.t_stride + d]);
    }
    for (int64_t i = threadIdx.x; i < count * D; i += blockDim.x)
        values[(past + first) * D + i] = narrow(job.v[from + (first + i / D) * job.t_stride + i % D]);
}

// --- attention -----------------------------------------------------------------------------------
//
// A block computes up to QUERIES queries of a head, in three steps:
//
//   scores         keys, a panel a warp      weights: a query a warp       values, 32 columns a warp
//   | q (QUERIES,  |  D rows: one slot      | 16 partial sums, |          | longest  |
//   |    D) in     |  a lane, a chain       | lane i has those |          | rows: a  |
//   |    shared    |  along d for each      | of i and i + 16  |          | chain    |
//   |    memory    v  query                 |------------------>          v along s  |
//
// Lanes read keys and values as they lie in memory, 128 bytes a warp, once for all QUERIES or
// QUERIES_MIXED queries. Scores, then weights, are in shared memory, or in `scratch` (`attend_long`).

// Queries `first` to first + count - 1 of a head.
struct queries {
    int64_t head, b, first;
    int count;
    int longest;  // number of keys that a query sees, at most
    int stride;   // of the rows of scores
    int q_stride; // of the queries
    float *scores, *q, *sums;
};

// Copy queries to shared memory.
DEVICE void load_queries(const struct attend &job, const queries &these)
{
    const float *q = job.q + these.b * job.b_stride + these.head % job.H * job.h_stride;
    int D = (int)job.D;
#pragma unroll 2
    for (int i = threadIdx.x; i < these.count * D; i += blockDim.x) {
        int row = i / D, d = i % D;
        these.q[row * these.q_stride + d] = q[(these.first + row) * job.t_stride + d];
    }
}

// Compute the scores of all keys that a query sees. Results past `count` queries are not stored.
template <int QUERIES> DEVICE void score_keys(const struct attend &job, const queries &these)
{
    int lane = threadIdx.x % WARP, warps = blockDim.x / WARP, D = (int)job.D;
    for (int s = threadIdx.x / WARP * SLOTS; s < these.longest; s += warps * SLOTS) {
        const cached *key = job.keys + (these.head * job.cache_panels * SLOTS + s) * D + lane;
        float sums[QUERIES] = {};
        int d = 0;
#pragma unroll (QUERIES == 1 ? 8 : 4)
        for (; d + 4 <= D; d += 4, key += 4 * SLOTS) {
            float four[4] = {widen(key[0]), widen(key[SLOTS]), widen(key[2 * SLOTS]), widen(key[3 * SLOTS])};
            UNROLLED for (int r = 0; r < QUERIES; r++) {
                float4 q = *(const float4 *)(these.q + r * these.q_stride + d);
                sums[r] = multiply_add(q.x, four[0], sums[r]);
                sums[r] = multiply_add(q.y, four[1], sums[r]);
                sums[r] = multiply_add(q.z, four[2], sums[r]);
                sums[r] = multiply_add(q.w, four[3], sums[r]);
            }
        }
        for (; d < D; d++, key += SLOTS)
            UNROLLED for (int r = 0; r < QUERIES; r++)
                sums[r] = multiply_add(these.q[r * these.q_stride + d], widen(*key), sums[r]);
        UNROLLED for (int r = 0; r < QUERIES; r++)
            if (r < these.count)
                these.scores[r * these.stride + s + lane] = sums[r];
    }
}

// Replace n scores by exp(scale * score - max(scale * score)), by a warp. Return their sum.
DEVICE float exponentials_of(float *scores, int n, float scale)
{
    int lane = threadIdx.x % WARP;
    float largest = -INFINITY, sum = 0;
#pragma unroll 4
    for (int s = lane; s < n; s += WARP) {
        float score = scores[s] * scale;
        scores[s] = score;
        largest = larger_of(largest, score);
    }
    largest = warp_largest(largest);
#pragma unroll 2
    for (int start = 0; start < n; start += WARP) {
        int s = start + lane;
        float weight = s < n ? exp_of(scores[s] - largest) : 0.0f;
        if (s < n)
            scores[s] = weight;
        float other = exchange(weight, PARTIAL_SUMS);
        sum += lane < PARTIAL_SUMS ? weight : other;
        sum += lane < PARTIAL_SUMS ? other : weight;
    }
    return tree_sum(sum);
}

// Copy factor * numbers to a row of S elements, and fill the rest of it, by a warp.
DEVICE void copy_scaled(const float *numbers, int n, float factor, float *row, int S, float fill)
{
#pragma unroll 1
    for (int s = threadIdx.x % WARP; s < S; s += WARP)
        row[s] = s < n ? factor * numbers[s] : fill;
}

// Turn the scores of a query, or those of a hook, into weights, by a warp.
DEVICE void weigh_keys(const struct attend &job, const queries &these, int r)
{
    int64_t query = these.first + r;
    int n = (int)job.visible[these.b * job.T + query], S = (int)job.S;
    int64_t start = (these.head * job.T + query) * job.S; // of the row for hooks
    float *scores = these.scores + r * these.stride, sum = 1;
    if (job.known_step != NOTHING) {
        const float *known = job.known_step == KNOWN_SCORES ? job.scores : job.pattern;
        copy_scaled(known + start, n, 1, scores, n, 0);
    } else if (job.scores)
        copy_scaled(scores, n, job.scale, job.scores + start, S, -INFINITY);
    if (job.known_step != KNOWN_PATTERN)
        sum = exponentials_of(scores, n, job.known_step == NOTHING ? job.scale : 1);
    if (job.pattern && job.known_step != KNOWN_PATTERN)
        copy_scaled(scores, n, 1 / sum, job.pattern + start, S, 0);
#pragma unroll 1
    for (int s = n + threadIdx.x % WARP; s < these.longest; s += WARP)
        scores[s] = 0; // only other queries of the block see this key
    if (threadIdx.x % WARP == 0)
        these.sums[r] = sum;
}

// Load `count` values, or BATCH if there are more, of a column.
template <int BATCH> DEVICE void load_values(const cached *value, int D, int count, float (&numbers)[BATCH])
{
    if (count >= BATCH)
        UNROLLED for (int i = 0; i < BATCH; i++)
            numbers[i] = widen(value[i * D]);
    else
        UNROLLED for (int i = 0; i < BATCH; i++)
            numbers[i] = i < count ? widen(value[i * D]) : 0.0f;
}

// Mix the values for QUERIES queries from number `row` on, in 32 columns from `start` on, by a warp.
// BATCH values are loaded while the ones before are used.
template <int QUERIES, int BATCH>
DEVICE void mix_values(const struct attend &job, const queries &these, int row, int start)
{
    int D = (int)job.D, d = start + threadIdx.x % WARP, s = 0;
    const cached *value = job.values + these.head * job.cache_panels * SLOTS * D + smaller(d, D - 1);
    const float *weights = these.scores + row * these.stride;
    float mixed[QUERIES] = {}, next[BATCH];
    load_values<BATCH>(value, D, these.longest, next);
    for (; s + BATCH <= these.longest; s += BATCH) {
        float now[BATCH];
        UNROLLED for (int i = 0; i < BATCH; i++)
            now[i] = next[i];
        value += BATCH * D;
        load_values<BATCH>(value, D, these.longest - s - BATCH, next);
        UNROLLED for (int i = 0; i < BATCH; i += 4)
            UNROLLED for (int r = 0; r < QUERIES; r++) {
                float4 four = *(const float4 *)(weights + r * these.stride + s + i);
                mixed[r] = multiply_add(four.x, now[i], mixed[r]);
                mixed[r] = multiply_add(four.y, now[i + 1], mixed[r]);
                mixed[r] = multiply_add(four.z, now[i + 2], mixed[r]);
                mixed[r] = multiply_add(four.w, now[i + 3], mixed[r]);
            }
    }
    UNROLLED for (int i = 0; i < BATCH; i++)
        UNROLLED for (int r = 0; r < QUERIES; r++)
            if (s + i < these.longest)
                mixed[r] = multiply_add(weights[r * these.stride + s + i], next[i], mixed[r]);
    float *y = job.y + (these.b * job.T + these.first + row) * job.H * D + these.head % job.H * D + d;
    UNROLLED for (int r = 0; r < QUERIES; r++)
        if (row + r < these.count && d < D)
            y[r * D * job.H] = mixed[r] / these.sums[row + r];
}

template <int QUERIES, int QUERIES_MIXED, int BATCH>
DEVICE void attend_queries(const struct attend &job, const queries &these)
{
    int warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    load_queries(job, these);
    sync_block();
    if (job.known_step == NOTHING)
        score_keys<QUERIES>(job, these);
    sync_block();
    for (int r = warp; r < these.count; r += warps)
        weigh_keys(job, these, r);
    sync_block();
    const int parts = QUERIES / QUERIES_MIXED;
    for (int task = warp; task < ceil_div((int)job.D, (int)WARP) * parts; task += warps)
        if (task % parts * QUERIES_MIXED < these.count)
            mix_values<QUERIES_MIXED, BATCH>(job, these, task % parts * QUERIES_MIXED, task / parts * WARP);
}

// Return the largest of up to 32 numbers, by each warp.
DEVICE int longest_of(const int64_t *visible, int count)
{
    int lane = threadIdx.x % WARP, longest = lane < count ? (int)visible[lane] : 0;
    UNROLLED for (int lanes = WARP / 2; lanes; lanes /= 2)
        longest = larger(longest, exchange(longest, lanes));
    return longest;
}

// Return the queries of this block. Later queries see more keys. They come first, so that all blocks
// finish together.
template <int QUERIES> DEVICE queries queries_of(const struct attend &job, bool in_scratch)
{
    queries these;
    int64_t heads = job.B * job.H, tiles = ceil_div(job.T, QUERIES);
    these.head = blockIdx.x % heads;
    these.b = these.head / job.H;
    these.first = (tiles - 1 - blockIdx.x / heads) * QUERIES;
    these.count = (int)smaller(job.T - these.first, (int64_t)QUERIES);
    these.longest = longest_of(job.visible + these.b * job.T + these.first, these.count);
    these.stride = (int)ceil_div(job.S, SLOTS) * SLOTS;
    these.q_stride = (int)ceil_div(job.D, 4) * 4;
    these.q = (float *)shared_memory;
    these.sums = these.q + QUERIES * these.q_stride;
    these.scores = these.sums + ceil_div(QUERIES, 4) * 4;
    if (in_scratch)
        these.scores = job.scratch + (int64_t)blockIdx.x * these.stride;
    return these;
}

// softmax(scale * q keysT, over the visible keys) values, by blocks of as many queries as the name says.
//
// grid: B * H * ceil(T / queries); block: whole warps; shared memory: the queries, their sums, and
// their scores unless these are in `scratch`. `plans.attend` chooses a kernel and says these numbers.
KERNEL LAUNCH_BOUNDS(128, 3) attend_16(const struct attend job)
{
    queries these = queries_of<16>(job, false);
    attend_queries<16, 8, 8>(job, these);
}

KERNEL LAUNCH_BOUNDS(128, 4) attend_8(const struct attend job)
{
    queries these = queries_of<8>(job, false);
    attend_queries<8, 4, 8>(job, these);
}

KERNEL LAUNCH_BOUNDS(128, 6) attend_1(const struct attend job)
{
    queries these = queries_of<1>(job, false);
    attend_queries<1, 1, 16>(job, these);
}

KERNEL LAUNCH_BOUNDS(128, 6) attend_long(const struct attend job)
{
    queries these = queries_of<1>(job, true);
    attend_queries<1, 1, 16>(job, these);
}
