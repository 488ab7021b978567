// Packing of matrices into panels. See pack.c in ops/native.

// Return a weight of `job.rows`, or the padding.
DEVICE weight stored_weight(const pack &job, int64_t row, int64_t column)
{
#if FORMAT == 0
    const weight row_padding = -0.0f;
#elif FORMAT == 3
    const weight row_padding = 0;
#else
    const weight row_padding = 0x8000; // -0
#endif
    if (row >= job.n_in)
        return row_padding;
    if (column >= job.n_out)
        return 0;
    const weight *rows = (const weight *)job.rows;
    return job.transposed ? rows[(column - job.first) * job.n_in + row]
                          : rows[(row - job.first) * job.n_out + column];
}

#if FORMAT == 3

// Store the scale of one group of a column.
DEVICE void pack_scale(const pack &job, int64_t group, int64_t column)
{
    int64_t groups = ceil_div(job.n_in, GROUP);
    float scale = 0;
    if (column < job.n_out)
        scale = job.transposed ? job.scales[(column - job.first) * groups + group]
                               : job.scales[(group - job.first / GROUP) * job.n_out + column];
    struct int8_group *panel = (struct int8_group *)(job.panels + column / PANEL * job.units * UNIT_BYTES);
    panel[group].scales[column % PANEL] = (uint16_t)((uint32_t)bits_of(scale) >> 16);
}

#endif

// Pack stored rows. The last piece of a matrix packs the padding, too.
//
// grid: any; block: any; no shared memory. Consecutive threads store consecutive weights of a panel:
// ROWS_PER_LOAD rows of a column, then the next column.
KERNEL pack(const struct pack job)
{
    int64_t rows = job.units * ROW_UNIT, columns = ceil_div(job.n_out, PANEL) * PANEL;
    int64_t row_start = 0, row_end = rows, column_start = 0, column_end = columns;
    int64_t end = job.first + job.count;
    if (job.transposed) {
        column_start = job.first;
        column_end = end < job.n_out ? end : columns;
    } else {
        row_start = job.first;
        row_end = end < job.n_in ? end : rows;
    }
    int64_t first_load = row_start / ROWS_PER_LOAD, first_panel = column_start / PANEL;
    int64_t loads = ceil_div(row_end, ROWS_PER_LOAD) - first_load;
    int64_t count = (ceil_div(column_end, PANEL) - first_panel) * loads * PANEL * ROWS_PER_LOAD;
    int64_t threads = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += threads) {
        int64_t piece = i / (PANEL * ROWS_PER_LOAD);
        int64_t row = (first_load + piece % loads) * ROWS_PER_LOAD + i % ROWS_PER_LOAD;
        int64_t column = (first_panel + piece / loads) * PANEL + i / ROWS_PER_LOAD % PANEL;
        if (row < row_start || row >= row_end || column < column_start || column >= column_end)
            continue;
        char *panel = job.panels + column / PANEL * job.units * UNIT_BYTES;
        *(weight *)(panel + weight_offset(row, (int)(column % PANEL))) = stored_weight(job, row, column);
#if FORMAT == 3
        if (row % GROUP == 0)
            pack_scale(job, row / GROUP, column);
#endif
    }
}
