// Races between the threads of a launch: two accesses to a byte, one of them a write, without barriers
// that put one before the other. Kernels that are compiled with `-fsanitize=thread` report each access.
// In global memory, a read is compared with the writes before it, but not with those after it. A launch
// whose threads start backwards has many of these in the other order.
//
// Each thread has a vector clock (Flanagan and Freund, FastTrack, 2009): the last moment of each other
// thread that is known to be over. A barrier collects the clocks of those that arrive, and gives all of
// them to those that go on. Votes and exchanges of lanes order no memory.

#pragma once

#include "scheduler.h"

namespace emulated {

// Begin a launch of so many threads that are alive at once. Forget all accesses of the one before.
void begin_races(bool watch, int threads);

// A block begins: its shared memory, and the clocks of its threads.
void begin_block(const block &b, int first_thread, int threads);

// The running thread releases what it did, or acquires what others released.
void release_into(moments &clock);
void acquire_from(const moments &clock);
void acquire_from(const moments &clock, thread *t);

// Add what another clock knows.
void join(moments &clock, const moments &other);

// The running thread accesses memory.
void note_write(const void *at, int size);
void note_read(const void *at, int size);

// Return the races of the launch, one a line.
std::string races();

} // namespace emulated
