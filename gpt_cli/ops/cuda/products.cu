// Products of rows with a matrix. See products.h in ops/native.
//
// A block computes a tile of ROWS x COLUMNS results, a thread HIGH x WIDE of them, all in registers.
// The lanes of a warp are 4 rows x 8 columns, and the lanes' next results are 4 rows below or one panel
// to the right. All threads copy the next rows of x and of w, STEP along k, to shared memory, and all add.
//
//                   w | panel 0 | panel 1 | ..            STEP rows of w, as they are stored
//                     | 0 .. 7  | 0 .. 7  |
//            x        |---------|---------|
//     row 0   ------- | lanes 0 to 7      |  i = 0
//     row 1   ------- | lanes 8 to 15     |
//     row 2   ------- | lanes 16 to 23    |
//     row 3   ------- | lanes 24 to 31    |
//     row 4   ------- | lanes 0 to 7      |  i = 1, to HIGH - 1; then the rows of the next warp
//     ...               j = 0     j = 1, to WIDE - 1; then the panels of the next warp
//
// x is padded with 0 and w with -0 along k. Rows and panels past the end repeat the last ones; their
// results are not stored.

enum { STAGES = 3, LANE_ROWS = WARP / PANEL };

// The sizes of a tile, and the rows and columns of a thread in it.
template <int tile_rows, int tile_columns, int high, int wide> struct tile {
    enum {
        ROWS = tile_rows,
        COLUMNS = tile_columns,
        HIGH = high,
        WIDE = wide,
        THREADS = ROWS / HIGH * (COLUMNS / WIDE),
        PANELS = COLUMNS / PANEL,
        WARPS_ACROSS = PANELS / WIDE,
    };
    static DEVICE int64_t row_start() { return (int64_t)blockIdx.y * ROWS; }
    static DEVICE int64_t first_panel() { return (int64_t)blockIdx.x * PANELS; }
    static DEVICE int column() { return threadIdx.x % PANEL; }
    // The row and the panel, in the tile, of a thread's results [i][j].
    static DEVICE int row(int i)
    {
        return (threadIdx.x / WARP / WARPS_ACROSS * HIGH + i) * LANE_ROWS + threadIdx.x % WARP / PANEL;
    }
    static DEVICE int panel(int j) { return threadIdx.x / WARP % WARPS_ACROSS * WIDE + j; }
};

// Return the columns of results [.][j], and those of the bias.
template <class T> DEVICE int64_t column_of(int j)
{
    return (T::first_panel() + T::panel(j)) * PANEL + T::column();
}

template <class T> DEVICE float bias_of(const struct linear &job, int j)
{
    int64_t column = column_of<T>(j);
    return job.bias && column < job.w.n_out ? job.bias[column] : 0.0f;
}

// Apply the activation in shared memory, one copy of its code for all results of a thread.
template <class T> DEVICE void activate_all(int activation, float (&sums)[T::HIGH][T::WIDE])
{
    float *numbers = (float *)shared_memory + threadIdx.x;
    sync_block(); // the other threads have read the last stage
    UNROLLED for (int i = 0; i < T::HIGH * T::WIDE; i++)
        numbers[i * T::THREADS] = sums[i / T::WIDE][i % T::WIDE];
    for (int i = 0; i < T::HIGH * T::WIDE; i++)
        numbers[i * T::THREADS] = activate(numbers[i * T::THREADS], activation);
    UNROLLED for (int i = 0; i < T::HIGH * T::WIDE; i++)
        sums[i / T::WIDE][i % T::WIDE] = numbers[i * T::THREADS];
}

// y = residual + activation(sums).
template <class T> DEVICE void store_results(const struct linear &job, float (&sums)[T::HIGH][T::WIDE])
{
    if (job.activation != NONE)
        activate_all<T>(job.activation, sums);
    int64_t n_out = job.w.n_out;
    UNROLLED for (int i = 0; i < T::HIGH && job.residual; i++) // y may be the residual: first load all
        UNROLLED for (int j = 0; j < T::WIDE; j++) {
            int64_t row = T::row_start() + T::row(i), column = column_of<T>(j);
            if (row < job.rows && column < n_out)
                sums[i][j] = job.residual[row * n_out + column] + sums[i][j];
        }
    UNROLLED for (int i = 0; i < T::HIGH; i++)
        UNROLLED for (int j = 0; j < T::WIDE; j++) {
            int64_t row = T::row_start() + T::row(i), column = column_of<T>(j);
            if (row < job.rows && column < n_out)
                job.y[row * n_out + column] = sums[i][j];
        }
}

#if FORMAT != 3

// STEP rows of w and columns of x, in shared memory. x is padded, so that rows begin in other banks.
template <int ROWS, int PANELS, int STEP> struct stage {
    float x[ROWS][STEP + 4];
    float w[PANELS][STEP / 4][PANEL][4];
};

// The copies of one thread: their sources, which advance along k.
template <class T, int STEP> struct copies {
    enum {
        X_PER_ROW = STEP / 4, // of 16 bytes
        X_COUNT = T::ROWS * X_PER_ROW,
        X_COPIES = (X_COUNT + T::THREADS - 1) / T::THREADS,
        W_PER_PANEL = STEP * PANEL / ROWS_PER_LOAD,
        W_COUNT = T::PANELS * W_PER_PANEL,
        W_COPIES = (W_COUNT + T::THREADS - 1) / T::THREADS,
    };
    typedef stage<T::ROWS, T::PANELS, STEP> Stage;
    const float *x[X_COPIES];
    const uint4 *w[W_COPIES];
    uint4 ahead[W_COPIES]; // 16 bits: loaded, to be widened
    int left;              // of n_in
    int whole;             // stages of x that are copied by 16 bytes

    DEVICE void start(const struct linear &job)
    {
        int64_t last_row = job.rows - 1, last_panel = ceil_div(job.w.n_out, PANEL) - 1;
        left = (int)job.w.n_in;
        whole = left % 4 == 0 && (int64_t)job.x % 16 == 0 ? left / STEP : 0;
        UNROLLED for (int n = 0; n < X_COPIES; n++) {
            int i = n * T::THREADS + threadIdx.x;
            int64_t row = smaller(T::row_start() + i / X_PER_ROW, last_row);
            x[n] = job.x + row * job.w.n_in + i % X_PER_ROW * 4;
        }
        UNROLLED for (int n = 0; n < W_COPIES; n++) {
            int i = n * T::THREADS + threadIdx.x;
            int64_t panel = smaller(T::first_panel() + i / W_PER_PANEL, last_panel);
            w[n] = (const uint4 *)panel_of(job.w, panel) + i % W_PER_PANEL;
        }
    }

    // Copy x of a whole stage. Rows begin at a multiple of 16 bytes.
    DEVICE void copy_x(Stage &to)
    {
        UNROLLED for (int n = 0; n < X_COPIES; n++) {
            int i = n * T::THREADS + threadIdx.x;
            if (X_COUNT % T::THREADS == 0 || i < X_COUNT)
                copy16(&to.x[i / X_PER_ROW][i % X_PER_ROW * 4], x[n]);
        }
    }

    // Copy x of any stage. Where a row has ended, store zeros.
    DEVICE void copy_numbers(Stage &to)
    {
        UNROLLED for (int n = 0; n < X_COPIES; n++) {
            int i = n * T::THREADS + threadIdx.x, at = i % X_PER_ROW * 4;
            for (int k = 0; k < 4 && i < X_COUNT; k++)
                to.x[i / X_PER_ROW][at + k] = at + k < left ? x[n][k] : 0.0f;
        }
    }

    // Start to copy the next stage.
    DEVICE void load(Stage &to)
    {
        if (whole-- > 0)
            copy_x(to);
        else
            copy_numbers(to);
        UNROLLED for (int n = 0; n < X_COPIES; n++)
            x[n] += STEP;
        UNROLLED for (int n = 0; n < W_COPIES; n++) {
            int i = n * T::THREADS + threadIdx.x;
            if (W_COUNT % T::THREADS == 0 || i < W_COUNT) {
#if FORMAT == 0
                copy16((uint4 *)to.w + i, w[n]);
#else
                ahead[n] = *w[n];
#endif
            }
            w[n] += W_PER_PANEL;
        }
        left -= STEP;
        commit_copies();
    }

    // Complete it: widen the weights that are loaded.
    DEVICE void store(Stage &to)
    {
#if FORMAT != 0
        UNROLLED for (int n = 0; n < W_COPIES; n++) {
            int i = n * T::THREADS + threadIdx.x, load = i % W_PER_PANEL;
            if (W_COUNT % T::THREADS && i >= W_COUNT)
                break;
            float (*rows)[PANEL][4] = to.w[i / W_PER_PANEL] + load / PANEL * 2;
            const uint32_t pairs[] = {ahead[n].x, ahead[n].y, ahead[n].z, ahead[n].w};
            float numbers[8];
            UNROLLED for (int k = 0; k < 8; k++)
                numbers[k] = widen_weight((uint16_t)(pairs[k / 2] >> k % 2 * 16));
            UNROLLED for (int half = 0; half < 2; half++)
                *(float4 *)rows[half][load % PANEL] = *(float4 *)(numbers + half * 4);
        }
#endif
    }
};

// Add STEP products to each sum, one after the other.
template <class T, int STEP>
DEVICE void add_products(const stage<T::ROWS, T::PANELS, STEP> &from, float (&sums)[T::HIGH][T::WIDE])
{
    UNROLLED for (int four = 0; four < STEP / 4; four++) {
        float w[T::WIDE][4], x[4];
        UNROLLED for (int j = 0; j < T::WIDE; j++)
            *(float4 *)w[j] = *(const float4 *)from.w[T::panel(j)][four][T::column()];
        UNROLLED for (int i = 0; i < T::HIGH; i++) {
            *(float4 *)x = *(const float4 *)&from.x[T::row(i)][four * 4];
            UNROLLED for (int k = 0; k < 4; k++)
                UNROLLED for (int j = 0; j < T::WIDE; j++)
                    sums[i][j] = multiply_add(x[k], w[j][k], sums[i][j]);
        }
    }
}

// Compute a tile. A stage is copied while the two before it are used.
template <class T, int STEP> DEVICE void multiply(const struct linear &job)
{
    stage<T::ROWS, T::PANELS, STEP> *stages = (stage<T::ROWS, T::PANELS, STEP> *)shared_memory;
    float sums[T::HIGH][T::WIDE];
    UNROLLED for (int j = 0; j < T::WIDE; j++) {
        float bias = bias_of<T>(job, j);
        UNROLLED for (int i = 0; i < T::HIGH; i++)
            sums[i][j] = bias;
    }
    int steps = ceil_div((int)job.w.n_in, STEP), from = 0, to = STAGES - 1;
    copies<T, STEP> copies;
    copies.start(job);
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < steps) {
            copies.load(stages[step]);
            copies.store(stages[step]);
        } else
            commit_copies();
    }
    for (int step = 0; step < steps; step++) {
        bool more = step + STAGES - 1 < steps;
        wait_for_copies<STAGES - 2>();
        sync_block(); // all have used the stage that is copied next
        if (more)
            copies.load(stages[to]);
        else
            commit_copies();
        add_products<T, STEP>(stages[from], sums);
        if (more)
            copies.store(stages[to]);
        from = from + 1 == STAGES ? 0 : from + 1;
        to = to + 1 == STAGES ? 0 : to + 1;
    }
    store_results<T>(job, sums);
}

#else // int8

// A group of x and of w, in shared memory. x is padded, so that rows begin in other banks.
template <int ROWS, int PANELS> struct stage {
    int8_t x[ROWS][2 * GROUP + 16]; // high, low
    int8_group w[PANELS];
};

// The copies of one thread: their sources, which advance by groups.
template <class T> struct copies {
    enum {
        X_PER_ROW = sizeof(digits) / 16,
        X_COUNT = T::ROWS * X_PER_ROW,
        X_COPIES = (X_COUNT + T::THREADS - 1) / T::THREADS,
        W_PER_PANEL = sizeof(int8_group) / 16,
        W_COUNT = T::PANELS * W_PER_PANEL,
        W_COPIES = (W_COUNT + T::THREADS - 1) / T::THREADS,
    };
    const uint4 *x[X_COPIES], *w[W_COPIES];

    DEVICE void start(const struct linear &job)
    {
        int64_t last_row = job.rows - 1, last_panel = ceil_div(job.w.n_out, PANEL) - 1;
        UNROLLED for (int n = 0; n < X_COPIES; n++) {
            int i = n * T::THREADS + threadIdx.x;
            int64_t row = smaller(T::row_start() + i / X_PER_ROW, last_row);
            x[n] = (const uint4 *)job.digits + row * job.w.units * X_PER_ROW + i % X_PER_ROW;
        }
        UNROLLED for (int n = 0; n < W_COPIES; n++) {
            int i = n * T::THREADS + threadIdx.x;
            int64_t panel = smaller(T::first_panel() + i / W_PER_PANEL, last_panel);
            w[n] = (const uint4 *)panel_of(job.w, panel) + i % W_PER_PANEL;
        }
    }

    // Start to copy the next group.
    DEVICE void load(stage<T::ROWS, T::PANELS> &to)
    {
        UNROLLED for (int n = 0; n < X_COPIES; n++, x[n - 1] += X_PER_ROW) {
            int i = n * T::THREADS + threadIdx.x;
            if (X_COUNT % T::THREADS == 0 || i < X_COUNT)
                copy16(&to.x[i / X_PER_ROW][i % X_PER_ROW * 16], x[n]);
        }
        UNROLLED for (int n = 0; n < W_COPIES; n++, w[n - 1] += W_PER_PANEL) {
            int i = n * T::THREADS + threadIdx.x;
            if (W_COUNT % T::THREADS == 0 || i < W_COUNT)
                copy16((uint4 *)to.w + i, w[n]);
        }
        commit_copies();
    }
};

DEVICE int32_t dot16(uint4 x, uint4 y, int32_t sum)
{
    sum = dot4(x.x, y.x, sum);
    sum = dot4(x.y, y.y, sum);
    sum = dot4(x.z, y.z, sum);
    return dot4(x.w, y.w, sum);
}

// Add the dot product of a group, an integer times the scale, to each sum.
template <class T>
DEVICE void add_group(const stage<T::ROWS, T::PANELS> &from, float (&sums)[T::HIGH][T::WIDE])
{
    int32_t high[T::HIGH][T::WIDE] = {}, low[T::HIGH][T::WIDE] = {};
    UNROLLED for (int k = 0; k < GROUP; k += 16) {
        uint4 w[T::WIDE];
        UNROLLED for (int j = 0; j < T::WIDE; j++)
            w[j] = *(const uint4 *)from.w[T::panel(j)].weights[k / 16][T::column()];
        UNROLLED for (int i = 0; i < T::HIGH; i++) {
            uint4 upper = *(const uint4 *)(from.x[T::row(i)] + k);
            uint4 lower = *(const uint4 *)(from.x[T::row(i)] + GROUP + k);
            UNROLLED for (int j = 0; j < T::WIDE; j++) {
                high[i][j] = dot16(upper, w[j], high[i][j]);
                low[i][j] = dot16(lower, w[j], low[i][j]);
            }
        }
    }
    UNROLLED for (int j = 0; j < T::WIDE; j++) {
        float scale = widen_bfloat16(from.w[T::panel(j)].scales[T::column()]);
        UNROLLED for (int i = 0; i < T::HIGH; i++)
            sums[i][j] = multiply_add((float)(high[i][j] * 256 + low[i][j]), scale, sums[i][j]);
    }
}

// Compute a tile. A group is copied while the two before it are used.
template <class T> DEVICE void multiply(const struct linear &job)
{
    stage<T::ROWS, T::PANELS> *stages = (stage<T::ROWS, T::PANELS> *)shared_memory;
    float sums[T::HIGH][T::WIDE] = {};
    int groups = (int)job.w.units, from = 0, to = STAGES - 1;
    copies<T> copies;
    copies.start(job);
    for (int group = 0; group < STAGES - 1; group++) {
        if (group < groups)
            copies.load(stages[group]);
        else
            commit_copies();
    }
    for (int group = 0; group < groups; group++) {
        wait_for_copies<STAGES - 2>();
        sync_block(); // all have used the stage that is copied next
        if (group + STAGES - 1 < groups)
            copies.load(stages[to]);
        else
            commit_copies();
        add_group<T>(stages[from], sums);
        from = from + 1 == STAGES ? 0 : from + 1;
        to = to + 1 == STAGES ? 0 : to + 1;
    }
    UNROLLED for (int i = 0; i < T::HIGH; i++) {
        float step = job.steps[smaller(T::row_start() + T::row(i), job.rows - 1)];
        UNROLLED for (int j = 0; j < T::WIDE; j++)
            sums[i][j] = multiply_add(sums[i][j], step, bias_of<T>(job, j));
    }
    store_results<T>(job, sums);
}

#endif

// y = residual + activation(bias + x @ w), by tiles of as many rows and columns as the name says.
//
// grid: (columns of tiles, rows of tiles); block: T::THREADS; shared memory: STAGES stages, or the tile
// if that is more. `plans.linear` chooses a tile and says these numbers.
#if FORMAT == 3

KERNEL LAUNCH_BOUNDS(128, 1) linear_64x64(const struct linear job)
{
    multiply<tile<64, 64, 8, 4>>(job);
}
KERNEL LAUNCH_BOUNDS(128, 1) linear_32x48(const struct linear job)
{
    multiply<tile<32, 48, 4, 3>>(job);
}
KERNEL LAUNCH_BOUNDS(128, 1) linear_16x24(const struct linear job)
{
    multiply<tile<16, 24, 1, 3>>(job);
}

#else

KERNEL LAUNCH_BOUNDS(128, 1) linear_64x96(const struct linear job)
{
    multiply<tile<64, 96, 8, 6>, 16>(job);
}
KERNEL LAUNCH_BOUNDS(128, 1) linear_64x64(const struct linear job)
{
    multiply<tile<64, 64, 8, 4>, 16>(job);
}
KERNEL LAUNCH_BOUNDS(128, 1) linear_32x48(const struct linear job)
{
    multiply<tile<32, 48, 4, 3>, 32>(job);
}
KERNEL LAUNCH_BOUNDS(128, 1) linear_16x24(const struct linear job)
{
    multiply<tile<16, 24, 1, 3>, 32>(job);
}

#endif
