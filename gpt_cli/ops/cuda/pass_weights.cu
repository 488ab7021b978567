// Weights in a pass: one warp copies them from global memory to the rings of the warps that compute.
// See the picture in pass.cu.

// The lanes of a warp that arrive at the barrier of a stage that the warp has read. One is enough. But
// NVIDIA's racecheck does not know that `sync_warp` orders the reads of all lanes before this arrival:
// when it watches, all lanes arrive.
#ifndef RELEASING_LANES
#define RELEASING_LANES 1
#endif

// The next weights of one computing warp, in the order of use.
struct stream {
    const char *from;
    int step, product, panel, units; // where they are, and the units that are left of their panel
    int slot;                        // of the ring, where they go
    uint32_t parity;                 // of the phase that ends when this slot is free
};

// Find the next product that has a panel of this number. After the last product, `units` is 0.
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

// Advance past a stage whose copy has begun.
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
            sync_warp(); // each lane knows that a stage of its own is free: now all know of all
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
    if (threadIdx.x % WARP < RELEASING_LANES && barrier >= 0)
        arrive(shared_at<phase_barrier>(barrier));
}
