// Shared by the files of the pass: constants, and the division of shared memory. See pass.cu.

// What the host chooses for a device and a model: see `pass_plan` in plans.py.
#ifndef ROWS
#define ROWS 4 // at most, of a pass
#endif
#ifndef STAGE_UNITS
#define STAGE_UNITS 4 // units of a panel in a stage
#endif
#ifndef TILES
#define TILES 6 // of values in shared memory, at least 2
#endif

enum {
    PASS_WARPS = 8,    // that compute
    COPYING_WARP = 11, // shares its scheduler with warps 3 and 7, which often have no panel. Warps 8 to
                       // 10 do nothing
    PASS_THREADS = PASS_WARPS * WARP,
    STAGE_BYTES = STAGE_UNITS * UNIT_BYTES,
    PRODUCTS = 4, // of a layer, in the order of `struct layer`
    PLACES = 3,   // arrays of integers about rows
    PADDING = 4,  // floats between rows in shared memory: they begin at different banks
    RESULTS = (ROWS + 3) / 4, // of a lane: of rows l / 8, l / 8 + 4, ...
    TILE_KEYS = 32, // whose values are copied together
};

CONSTANT struct pass job; // that this launch computes

// The tokens of a pass. Where there can be only one, the compiler knows it.
DEVICE int64_t rows_of_pass() { return ROWS == 1 ? 1 : job.rows; }

enum product { C_ATTN, ATTN_C_PROJ, C_FC, MLP_C_PROJ, LM_HEAD };

// Offsets into the shared memory of a block.
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

// Return the layer norm that is before a product.
DEVICE struct norm norm_before(int number)
{
    if (number == PRODUCTS * job.n_layer)
        return job.ln_f;
    const layer &of = layers_of()[number / PRODUCTS];
    return number % PRODUCTS == C_ATTN ? of.ln_1 : of.ln_2;
}

DEVICE int products_of()
{
    return PRODUCTS * (int)job.n_layer + (job.only_layers ? 0 : 1);
}

// The integers about a row: its row of the cache, its position, and the first row of its text.
enum place { TEXT, POSITION, FIRST };

DEVICE int place_of(int place, int row)
{
    return shared_at<int32_t>(divide().places)[place * ROWS + row];
}

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
