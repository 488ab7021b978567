// The state of the emulated threads and of their copies.

#pragma once

#include "contexts.h"
#include "threads.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#pragma GCC visibility push(hidden)

namespace emulated {

constexpr int LANES = 32, BARRIERS = 16;
constexpr unsigned char GARBAGE = 0xff; // floats of these bytes are NaN

typedef std::vector<uint32_t> moments; // a clock: of each thread, see races.h

struct stack {
    char *memory;
    int size;
    context idle; // between two threads
};

struct copy {
    char *to;
    const char *from;
    int group;
};

struct block;

struct thread : identity {
    context here; // while it does not run
    stack *on;    // if it has started
    thread *next; // in its queue
    struct block *of;
    int number, warp; // in the launch, in its block
    const char *waits_in; // this function
    int at;               // this barrier
    std::vector<copy> copies;
    int groups; // that are closed
};

struct queue {
    thread *first = nullptr, *last = nullptr;

    void append(thread *t)
    {
        t->next = nullptr;
        (first ? last->next : first) = t;
        last = t;
    }

    void append(queue &others)
    {
        if (!others.first)
            return;
        (first ? last->next : first) = others.first;
        last = others.last;
        others = {};
    }

    void prepend(queue &others)
    {
        if (!others.first)
            return;
        others.last->next = first;
        if (!first)
            last = others.last;
        first = others.first;
        others = {};
    }

    void reverse()
    {
        queue reversed;
        while (thread *t = take()) {
            t->next = reversed.first;
            reversed.first = t;
            reversed.last = reversed.last ? reversed.last : t;
        }
        *this = reversed;
    }

    thread *take()
    {
        thread *t = first;
        if (t)
            first = t->next;
        return t;
    }
};

struct barrier {
    int arrived, threads;
    queue waiting;
    const char *function;
    moments clock; // of the threads that have arrived
};

struct warp {
    barrier lanes;
    int turn; // of two arrays: lanes may still read the other one
    unsigned long long brought[2][LANES + 1]; // the last is a bit per lane
};

// In shared memory.
struct phases {
    uint16_t ended, count, arrived, state;
};
constexpr uint16_t INITIALIZED = 0x6b1d, PUBLISHED = 0x6b1e;

struct range {
    char *to;
    const char *from;
    int bytes, lane, lanes;
    phases *ends_in;
    moments clock; // of the thread that copies
};

// The clocks of a barrier with phases: of those that arrive, and of the phases that have ended.
struct phase_clocks {
    moments arriving, ended;
};

struct block {
    int running; // threads that have not ended
    int size;    // of its shared memory
    barrier barriers[BARRIERS];
    std::vector<warp> warps;
    std::vector<range> ranges;         // under way
    std::vector<phases *> unpublished; // that were initialized
    std::map<void *, phase_clocks> clocks; // of the barriers
    std::vector<char> memory;
};

extern thread *running;
extern int64_t fruitless; // yields since the last progress

// End the launch with an error of the running thread.
[[noreturn]] void fail_here(const std::string &why);

} // namespace emulated

#pragma GCC visibility pop
