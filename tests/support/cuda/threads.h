// What the threads of an emulated GPU know of themselves, and the calls in which they may wait.

#pragma once

namespace emulated {

struct place {
    unsigned x, y, z;
};

struct identity {
    place thread, block;
    unsigned lane;
    char *shared; // memory of its block
};

extern identity *self; // the thread that runs
extern place block_size, grid_size;

// Wait for the other lanes of the warp. Return what all of them brought, and then a bit of each.
const unsigned long long *meet_lanes(unsigned long long brought, const char *function);
// Wait at a barrier of the block: at number 0 for all threads that have not ended.
void wait_at(int number, int threads);
// Let all other threads run first.
void yield(const char *function);
// Add to a counter that others read, or let them run first and read it.
void add_released(unsigned *counter, unsigned number);
unsigned load_acquired(const unsigned *counter);

// Copies of 16 bytes, which are made when the thread waits for their group.
void copy16(void *to, const void *from);
void commit_copies();
void wait_for_copies(int groups);

// Barriers with phases, and copies that are made when a thread waits for the barrier.
void init_phases(void *barrier, int count);
void publish_phases();
void arrive(void *barrier);
bool has_ended(void *barrier, unsigned parity);
void copy_range(void *to, const void *from, int bytes, void *barrier, int lane, int lanes);

} // namespace emulated
