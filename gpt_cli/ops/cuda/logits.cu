// Measures of a row of logits, by ROW_THREADS threads of a block, with the bits of ops/native: its
// largest numbers, its normalizer, and running sums of counts.

enum {
    ROW_THREADS = 256,
    ROW_WARPS = ROW_THREADS / WARP,
    SPAN = 64,         // columns whose largest logit is computed first, as in native/sampling.h
    CANDIDATES = 1024, // that fit in shared memory; more are in global memory
    STEPS = 32,        // of LOG_SUM_STEP elements, whose sums are added together
};

#define LOWEST -3.40282347e38f       // the smallest finite float
#define LARGEST_LOGIT 1.70141173e38f // half of the largest: no difference of two overflows

// Wait for the threads that share a row.
DEVICE void sync_row() { sync_threads(1, ROW_THREADS); }

// Shared memory for one row, at an offset that functions get as `at`. The largest logits of the spans
// follow.
struct row_memory {
    int counts[ROW_WARPS];
    float largest[ROW_WARPS], least[ROW_WARPS];
    float sums[2][STEPS * PARTIAL_SUMS];
    float kept[CANDIDATES], ordered[CANDIDATES], weights[CANDIDATES];
    int32_t columns[CANDIDATES];
    double normalizer;
    float kth;
    int32_t count, is_finite, last;
};

DEVICE row_memory *row_at(int at) { return shared_at<row_memory>(at); }

DEVICE float *span_maxima(int at) { return (float *)(row_at(at) + 1); }

// The elements of a row that a warp scans: whole spans, in the order of their columns.
struct span_range {
    int first, end;
};

DEVICE span_range spans_of_warp(int spans)
{
    int each = ceil_div(spans, ROW_WARPS), warp = threadIdx.x / WARP;
    return {smaller(each * warp, spans), smaller(each * (warp + 1), spans)};
}

// Write the largest logits of the spans, and return the largest of all. Set is_finite. Half a warp
// takes BATCH spans at a time, all of whose loads are on their way together.
ROUTINE float scan_row(const float *logits, int n, int at)
{
    const int BATCH = 4, EACH = SPAN / 16; // loads of a lane for a span
    row_memory *memory = row_at(at);
    int spans = ceil_div(n, SPAN), lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    float *maxima = span_maxima(at), largest = -INFINITY, least = INFINITY;
    bool is_number = true;
    for (int start = warp * 2 * BATCH; start < spans; start += ROW_WARPS * 2 * BATCH) {
        float x[BATCH][EACH];
        int first = start + lane / 16 * BATCH;
        UNROLLED for (int i = 0; i < BATCH; i++)
            UNROLLED for (int j = 0; j < EACH; j++) { // beyond the end, the last number
                int column = (first + i) * SPAN + j * 16 + lane % 16;
                x[i][j] = load_fresh(logits + smaller(column, n - 1));
            }
        UNROLLED for (int i = 0; i < BATCH; i++) {
            float most = -INFINITY;
            UNROLLED for (int j = 0; j < EACH; j++) {
                is_number = is_number && x[i][j] == x[i][j];
                most = larger_of(most, x[i][j]);
                least = x[i][j] < least ? x[i][j] : least;
            }
            UNROLLED for (int lanes = 8; lanes; lanes /= 2)
                most = larger_of(most, exchange(most, lanes));
            if (lane % 16 == 0 && first + i < spans)
                maxima[first + i] = most;
            largest = larger_of(largest, most);
        }
    }
    largest = warp_largest(largest);
    least = -warp_largest(-least);
    bool all_numbers = vote(!is_number) == 0;
    if (lane == 0) {
        memory->largest[warp] = largest;
        memory->least[warp] = all_numbers ? least : NAN;
    }
    sync_row();
    is_number = true;
    UNROLLED for (int i = 0; i < ROW_WARPS; i++) {
        bool is_empty = memory->least[i] > memory->largest[i]; // the warp had no span
        float width = absolute(memory->largest[i] - memory->least[i]);
        is_number = is_number && (is_empty || width < INFINITY);
        largest = larger_of(largest, memory->largest[i]);
        least = memory->least[i] < least ? memory->least[i] : least;
    }
    if (threadIdx.x == 0)
        memory->is_finite = is_number && absolute(largest - least) < INFINITY;
    return largest;
}

// Return a partial sum of e^(x - most) over LOG_SUM_STEP elements of a row, by half a warp: lane i has
// the elements i, i + PARTIAL_SUMS, ...
DEVICE float step_sum(const float *logits, int n, int step, float most)
{
    float sum = 0, x[LOG_SUM_STEP / PARTIAL_SUMS];
    int start = step * LOG_SUM_STEP + threadIdx.x % PARTIAL_SUMS;
    UNROLLED for (int j = 0; j < LOG_SUM_STEP / PARTIAL_SUMS; j++) { // all loads at once
        int column = start + j * PARTIAL_SUMS;
        x[j] = column < n ? load_fresh(logits + column) : -INFINITY;
    }
    UNROLLED for (int j = 0; j < LOG_SUM_STEP / PARTIAL_SUMS; j++)
        sum += exp_of(x[j] - most);
    return sum;
}

// Return log(sum(exp(x))) to all threads. The first warp has the sums: lanes i and i + PARTIAL_SUMS
// have that of the elements i, i + PARTIAL_SUMS, ...
DEVICE double finish_normalizer(double sum, float most, int at)
{
    if (threadIdx.x < WARP) {
        sum = tree_sum(sum);
        bool is_number = sum >= 1 && sum < (double)INFINITY;
        if (threadIdx.x == 0)
            row_at(at)->normalizer = is_number ? most + logarithm(sum) : (double)NAN;
    }
    sync_row();
    return row_at(at)->normalizer;
}

// Return log(sum(exp(x))) of a row whose largest number is `most`, to all threads. Steps are added in
// float32 to PARTIAL_SUMS sums, and those to PARTIAL_SUMS sums in float64 by the first warp.
ROUTINE double row_normalizer(const float *logits, int n, float most, int at)
{
    row_memory *memory = row_at(at);
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, part = lane % PARTIAL_SUMS;
    int steps = ceil_div(n, LOG_SUM_STEP);
    double sum = 0;
    for (int first = 0, turn = 0; first < steps; first += STEPS, turn ^= 1) {
        for (int i = 2 * warp + lane / PARTIAL_SUMS; i < STEPS; i += 2 * ROW_WARPS)
            memory->sums[turn][i * PARTIAL_SUMS + part] = step_sum(logits, n, first + i, most);
        sync_row(); // the sums of the turn before are read, too
        if (warp == 0)
            _Pragma("unroll 8") for (int i = 0; i < smaller(STEPS, steps - first); i++)
                sum += memory->sums[turn][i * PARTIAL_SUMS + part];
    }
    return finish_normalizer(sum, most, at);
}

KERNEL log_sum_exp(const struct log_sum_exp job)
{
    const float *logits = job.x + blockIdx.x * job.n;
    float most = scan_row(logits, job.n, 0);
    double normalizer = row_normalizer(logits, job.n, most, 0);
    if (threadIdx.x == 0)
        job.y[blockIdx.x] = normalizer;
}

// --- running sums of counts ----------------------------------------------------------------------

// Add the numbers of the threads before this one in the row, and return the sum of all in `total`.
DEVICE int64_t sum_before(int64_t number, int64_t *sums, int64_t &total)
{
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int64_t running = number;
    for (int distance = 1; distance < WARP; distance *= 2) {
        int64_t other = from_lane(running, lane < distance ? lane : lane - distance);
        running += lane < distance ? 0 : other;
    }
    sync_row(); // the sums of the call before are read
    if (lane == WARP - 1)
        sums[warp] = running;
    sync_row();
    int64_t before = running - number;
    total = 0;
    for (int i = 0; i < ROW_WARPS; i++) {
        before += i < warp ? sums[i] : 0;
        total += sums[i];
    }
    return before;
}

// A count is 1 + floor(COUNT_OF_LIKELIEST * e^(x - the largest)): product and conversion are exact.
KERNEL cumulate(const struct cumulate job)
{
    int64_t *warp_sums = (int64_t *)row_at(0)->kept, sum = 0, total;
    const float *logits = job.logits + blockIdx.x * job.n;
    int64_t *sums = job.sums + blockIdx.x * job.n;
    float most = scan_row(logits, job.n, 0);
    for (int64_t start = 0; start < job.n; start += ROW_THREADS) {
        int64_t column = start + threadIdx.x, count = 0;
        if (column < job.n)
            count = 1 + (int32_t)(exp_of(logits[column] - most) * (float)COUNT_OF_LIKELIEST);
        int64_t before = sum_before(count, warp_sums, total);
        if (column < job.n)
            sums[column] = sum + before + count;
        sum += total;
    }
}
