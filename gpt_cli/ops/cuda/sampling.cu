// The choice of a token from a row of logits, with the bits of native/sampling.h: the likeliest tokens
// are found without a sort of the row, and one draw chooses.

// Integers that compare as the floats do.
DEVICE uint32_t order_of(float x)
{
    uint32_t bits = (uint32_t)bits_of(x);
    return bits >> 31 ? ~bits : bits | 0x80000000;
}

DEVICE float float_at(uint32_t order)
{
    return float_of((int32_t)(order >> 31 ? order & 0x7fffffff : ~order));
}

// Return the k-th largest of n numbers, 1 <= k <= n, or a lower bound of it that has its first `bits`
// bits: bit by bit, by the first warp. Up to HELD numbers a lane stay in registers.
ROUTINE float kth_largest(const float *x, int n, int k, int bits, int at)
{
    const int HELD = 28;
    if (threadIdx.x < WARP) {
        uint32_t found = 0, held[HELD];
        UNROLLED for (int i = 0; i < HELD; i++) {
            int index = i * WARP + threadIdx.x;
            held[i] = index < n ? order_of(x[index]) : 0;
        }
        for (int bit = 31; bit > 31 - bits; bit--) {
            uint32_t bound = found | 1u << bit; // above 0, the order of no number
            int count = 0;
            UNROLLED for (int i = 0; i < HELD; i++)
                count += held[i] >= bound;
            for (int i = HELD * WARP + threadIdx.x; i < n; i += WARP)
                count += order_of(x[i]) >= bound;
            if (warp_sum(count) >= k)
                found = bound;
        }
        if (threadIdx.x == 0)
            row_at(at)->kth = float_at(found);
    }
    sync_row();
    float kth = row_at(at)->kth;
    sync_row(); // all have read it
    return kth;
}

// The candidates of a row: in shared memory, or in global memory if they are many.
struct candidates {
    float *kept, *ordered, *weights;
    int32_t *columns;
    int count;
};

// Append the numbers of a span that are at least `bound` to those that a warp has found.
DEVICE int append(float x, int column, bool is_kept, float *found, int32_t *where, int count)
{
    uint32_t kept = vote(is_kept);
    int to = count + count_bits(kept & ((1u << threadIdx.x % WARP) - 1));
    if (is_kept)
        found[to] = x, where[to] = column;
    return count + count_bits(kept);
}

// Find the logits of a warp's spans that are at least `bound`, BATCH spans at a time.
DEVICE int find_candidates(
    const float *logits, int n, float bound, float *found, int32_t *where, int at)
{
    const int BATCH = 4;
    span_range range = spans_of_warp(ceil_div(n, SPAN));
    int lane = threadIdx.x % WARP, count = 0;
    for (int start = range.first; start < range.end; start += WARP) {
        int index = smaller(start + lane, range.end - 1);
        uint32_t spans = vote(start + lane < range.end && span_maxima(at)[index] >= bound);
        while (spans) {
            int column[BATCH];
            float x[BATCH][2];
            UNROLLED for (int i = 0; i < BATCH; i++) {
                int span = first_bit(spans); // 0 if there is none
                column[i] = spans ? (start + span - 1) * SPAN + lane : n;
                spans &= spans - 1;
                UNROLLED for (int half = 0; half < 2; half++)
                    x[i][half] = load_fresh(logits + smaller(column[i] + half * WARP, n - 1));
            }
            UNROLLED for (int i = 0; i < BATCH; i++)
                UNROLLED for (int half = 0; half < 2; half++) {
                    int at_column = column[i] + half * WARP;
                    bool is_kept = at_column < n && x[i][half] >= bound;
                    count = append(x[i][half], at_column, is_kept, found, where, count);
                }
        }
    }
    return count;
}

// Write the logits of a row that are at least `bound`, with their columns, in the order of these.
// `scratch` has CHOICE_ARRAYS arrays of `size` numbers.
DEVICE candidates gather(
    const float *logits, int n, float bound, float *scratch, int64_t size, int at)
{
    row_memory *memory = row_at(at);
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, before = 0, total = 0;
    int first = spans_of_warp(ceil_div(n, SPAN)).first * SPAN;
    float *found = scratch + first; // of this warp
    int32_t *where = (int32_t *)(scratch + size) + first;
    int count = find_candidates(logits, n, bound, found, where, at);
    if (lane == 0)
        memory->counts[warp] = count;
    sync_row();
    for (int i = 0; i < ROW_WARPS; i++) {
        before += i < warp ? memory->counts[i] : 0;
        total += memory->counts[i];
    }
    candidates all = {memory->kept, memory->ordered, memory->weights, memory->columns, total};
    if (total > CANDIDATES)
        all = {scratch + 2 * size, scratch + 4 * size, scratch + 5 * size,
               (int32_t *)(scratch + 3 * size), total};
    for (int i = lane; i < count; i += WARP)
        all.kept[before + i] = found[i], all.columns[before + i] = where[i];
    sync_row();
    return all;
}

// Drop the candidates below `bound`; the others keep their order. One warp moves them.
DEVICE int keep_from(candidates all, float bound, int at)
{
    row_memory *memory = row_at(at);
    int lane = threadIdx.x % WARP, count = 0;
    if (threadIdx.x < WARP) {
        for (int start = 0; start < all.count; start += WARP) {
            bool is_inside = start + lane < all.count;
            float x = is_inside ? all.kept[start + lane] : 0.0f;
            int32_t column = is_inside ? all.columns[start + lane] : 0;
            bool is_kept = is_inside && x >= bound;
            uint32_t kept = vote(is_kept);
            int to = count + count_bits(kept & ((1u << lane) - 1));
            sync_warp(); // all have read
            if (is_kept)
                all.kept[to] = x, all.columns[to] = column;
            count += count_bits(kept);
            sync_warp();
        }
        if (lane == 0)
            memory->count = count;
    }
    sync_row();
    return memory->count;
}

// Sort `size` numbers, a power of two, the largest first (a bitonic network).
DEVICE void sort_descending(float *x, int size)
{
    for (int run = 2; run <= size; run *= 2)
        for (int apart = run / 2; apart; apart /= 2) {
            for (int i = threadIdx.x; i < size; i += ROW_THREADS) {
                int other = i ^ apart;
                if (other > i && (x[i] < x[other]) == ((i & run) == 0)) {
                    float kept = x[i];
                    x[i] = x[other], x[other] = kept;
                }
            }
            sync_row();
        }
}

// Return the sum of n numbers in their order, in float64.
DEVICE double sum_of(const float *x, int n)
{
    double sum = 0;
    _Pragma("unroll 8") for (int i = 0; i < n; i++)
        sum += x[i];
    return sum;
}

// Return the index of the number with which the running sum reaches `bound`, or exceeds it if
// `or_equal`; at most n - 1.
DEVICE int index_of_sum(const float *x, int n, double bound, bool or_equal)
{
    double sum = 0;
    int index = 0;
    for (int start = 0; start < n; start += 8) {
        float next[8];
        UNROLLED for (int i = 0; i < 8; i++) // all loads at once
            next[i] = x[smaller(start + i, n - 1)];
        UNROLLED for (int i = 0; i < 8; i++) {
            sum += next[i];
            bool goes_on = or_equal ? sum <= bound : sum < bound;
            if (!goes_on)
                return index;
            index = smaller(index + 1, n - 1);
        }
    }
    return index;
}

// Return the logit of the last of the likeliest tokens whose probabilities add up to p.
DEVICE float nucleus_bound(candidates all, double p, int at)
{
    row_memory *memory = row_at(at);
    int n = all.count, size = 1;
    while (size < n)
        size *= 2;
    for (int i = threadIdx.x; i < size; i += ROW_THREADS)
        all.ordered[i] = i < n ? all.kept[i] : -INFINITY;
    sync_row();
    sort_descending(all.ordered, size);
    for (int i = threadIdx.x; i < n; i += ROW_THREADS)
        all.weights[i] = exp_of(all.ordered[i]);
    sync_row();
    if (threadIdx.x == 0) {
        memory->last = index_of_sum(all.weights, n, p * sum_of(all.weights, n), false);
    }
    sync_row();
    return all.ordered[memory->last];
}

// The options for the choice of a token, with the names of `struct choose`.
struct choice {
    int64_t top_k;
    double top_p;
    float temperature, log_min_p;
};

// Return the token of a draw to the first thread. The logits are in `kept`, less the largest.
DEVICE int32_t draw_token(candidates all, const choice &how, double uniform, int at)
{
    float bound = -INFINITY;
    if (how.top_p < 1)
        bound = nucleus_bound(all, how.top_p, at);
    bound = how.log_min_p > bound ? how.log_min_p : bound;
    sync_row(); // the weights of the nucleus are read
    for (int i = threadIdx.x; i < all.count; i += ROW_THREADS)
        all.weights[i] = all.kept[i] >= bound ? exp_of(all.kept[i]) : 0.0f;
    sync_row();
    if (threadIdx.x)
        return 0;
    double total = sum_of(all.weights, all.count);
    return all.columns[index_of_sum(all.weights, all.count, uniform * total, true)];
}

// Choose the token of a row; `scan_row` has written the largest logits of its spans. Return it to the
// first thread.
ROUTINE int32_t choose_token(
    const float *logits, int n, const choice &how, double uniform, float *scratch, int64_t size,
    int at)
{
    int spans = ceil_div(n, SPAN);
    float bound = LOWEST, most = -INFINITY;
    if (how.top_k <= spans) // the k-th largest of the spans' largest is at most that of the row
        bound = larger_of(bound, kth_largest(span_maxima(at), spans, how.top_k, 20, at));
    candidates all = gather(logits, n, bound, scratch, size, at);
    if (!all.count) // damaged weights: no logit of the row is a number
        return 0;
    if (all.count > how.top_k) {
        bound = kth_largest(all.kept, all.count, how.top_k, 32, at);
        all.count = keep_from(all, bound, at);
    }
    _Pragma("unroll 8") for (int i = 0; i < all.count; i++)
        most = larger_of(most, all.kept[i]);
    int32_t first = all.columns[0];
    sync_row();
    if (!(most < INFINITY)) // damaged weights
        return first;
    for (int i = threadIdx.x; i < all.count; i += ROW_THREADS)
        all.kept[i] = (all.kept[i] - most) / how.temperature;
    sync_row();
    return draw_token(all, how, uniform, at);
}

KERNEL choose(const struct choose job)
{
    int64_t row = blockIdx.x;
    const float *logits = job.logits + row * job.n;
    scan_row(logits, job.n, 0);
    sync_row();
    choice how = {job.top_k, job.top_p, job.temperature, job.log_min_p};
    float *scratch = job.scratch + row * CHOICE_ARRAYS * job.scratch_size;
    int32_t id = choose_token(
        logits, job.n, how, job.uniforms[row], scratch, job.scratch_size, 0);
    if (threadIdx.x == 0)
        job.ids[row] = id;
}
