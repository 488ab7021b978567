// The chains of a lane in a pass: sums along the rows of a matrix, for one column and some rows of x.
//
// Lane l computes column l % 8 of a panel. In float, it has the rows l / 8, l / 8 + 4, ... In int8, the
// lanes l, l + 8, l + 16 and l + 24 multiply a group of GROUP rows each, for all rows of x. The sums of
// groups are integers, and exact. Each of these lanes adds them in order.

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

// Add the products of 16 int8 weights with 16 digits.
DEVICE int32_t dot16(int4 weights, int4 digits, int32_t sum)
{
    sum = dot4(weights.x, digits.x, sum);
    sum = dot4(weights.y, digits.y, sum);
    sum = dot4(weights.z, digits.z, sum);
    return dot4(weights.w, digits.w, sum);
}

// The chains of a lane in int8: one column of a panel and all rows of x.
struct chains {
    float sums[ROWS];
    int rows[ROWS]; // offsets of digits
};

// Return the dot product of a group of a column with the digits of a row: 256 * high + low.
DEVICE int32_t dot_group(const int4 (&weights)[GROUP / 16], const digits *x)
{
    int32_t high = 0, low = 0;
    UNROLLED for (int i = 0; i < GROUP / 16; i++) {
        high = dot16(weights[i], *(const int4 *)(x->high + 16 * i), high);
        low = dot16(weights[i], *(const int4 *)(x->low + 16 * i), low);
    }
    return (int32_t)((uint32_t)high << 8) + low;
}

// Add a range of units of a panel, which are groups. Each quarter of a warp multiplies one group. Then
// all lanes add the groups in order.
DEVICE void add_panel(chains &all, ring &from, int units)
{
    const int QUARTERS = WARP / PANEL;
    int lane = threadIdx.x % WARP, quarter = lane / PANEL, column = lane % PANEL;
    for (int first = 0; first < units; first += STAGE_UNITS) {
        int count = smaller(units - first, (int)STAGE_UNITS);
        wait_for(from);
        const int8_group *groups = shared_at<int8_group>(stage_of(from));
        _Pragma("unroll 2") for (int i = 0; i < count; i += QUARTERS) {
            int group = smaller(i + quarter, count - 1); // the last one again, which nobody adds
            int4 weights[GROUP / 16];
            UNROLLED for (int part = 0; part < GROUP / 16; part++)
                weights[part] = *(const int4 *)groups[group].weights[part][column];
            float scale = widen_bfloat16(groups[group].scales[column]);
            float scales[QUARTERS];
            UNROLLED for (int q = 0; q < QUARTERS; q++)
                scales[q] = from_lane(scale, q * PANEL + column);
            UNROLLED for (int j = 0; j < ROWS; j++) {
                const digits *x = shared_at<digits>(all.rows[j]) + first + group;
                float sum = (float)dot_group(weights, x);
                UNROLLED for (int q = 0; q < QUARTERS; q++) {
                    float of_quarter = from_lane(sum, q * PANEL + column);
                    if (i + q < count)
                        all.sums[j] = multiply_add(of_quarter, scales[q], all.sums[j]);
                }
            }
        }
        release_stage(empty_of(from));
        advance(from);
    }
}

#endif


#if FORMAT == 3

// Begin the chains of a panel: at 0, since the bias is added last.
DEVICE void start_chains(
    chains &all, int units, float bias)
{
    UNROLLED for (int j = 0; j < ROWS; j++) {
        all.sums[j] = 0;
        all.rows[j] = digits_at() + (j < rows_of_pass() ? j : 0) * units * (int)sizeof(digits);
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
    return multiply_add(sum, steps[row < rows_of_pass() ? row : 0], bias);
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
        all.rows[j] = from + (row < rows_of_pass() ? row : 0) * stride * (int)sizeof(float);
    }
}

DEVICE float result_of(
    const chains &all, int units, int i, float bias)
{
    return all.sums[i];
}

#endif
