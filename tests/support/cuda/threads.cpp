// The scheduler of an emulated GPU: each thread of a block is a coroutine.
//
// A thread runs until it waits or yields; then the first of the queue `ready` goes on. A thread that
// waits is in the queue of its barrier. A stack belongs to a thread from its start to its end, and
// the stack of one that has ended takes the next that has not started: without barriers, all threads
// run on one stack.

#include "races.h"

#include <cstdio>
#include <cstring>
#include <deque>
#include <map>

#include <signal.h>
#include <sys/mman.h>

namespace emulated {

identity *self;
place block_size, grid_size;
thread *running;
int64_t fruitless;

namespace {

constexpr int STACK = 1 << 17, PAGE = 1 << 12;
constexpr int ALIGNMENT = 128, MARGIN = 256; // of shared memory; writes beyond it show
constexpr int64_t PATIENCE = 30'000'000;     // yields without any progress: half a second

queue ready;
std::deque<thread> threads; // a deque does not move them
std::deque<block> blocks;
std::deque<stack> stacks;
std::vector<stack *> idle_stacks;
int unfinished;
context launcher;
std::string error;
void (*kernel)(void **);
void **arguments;

void run_threads();

void make_idle(stack &s)
{
    s.idle = start_of(s.memory, s.size, run_threads);
    idle_stacks.push_back(&s);
}

// End the launch. The threads that have not ended are given up.
[[noreturn]] void fail(const std::string &why)
{
    error = why;
    idle_stacks.clear();
    for (stack &s : stacks)
        make_idle(s);
    jump(launcher);
}

} // namespace

void fail_here(const std::string &why)
{
    char where[100];
    snprintf(where, sizeof where, "block %u %u %u, thread %u %u %u: ", self->block.x, self->block.y,
             self->block.z, self->thread.x, self->thread.y, self->thread.z);
    fail(where + why);
}

namespace {

[[noreturn]] void fail_waiting()
{
    std::map<std::string, int> groups;
    for (thread &t : threads) {
        if (!t.of || !t.waits_in)
            continue;
        std::string key = std::to_string(t.block.x) + " " + std::to_string(t.block.y) + " "
                          + std::to_string(t.block.z) + " in " + t.waits_in;
        groups[t.at ? key + " " + std::to_string(t.at) : key]++;
    }
    std::string why = "deadlock:";
    for (auto &[key, count] : groups)
        why += "\n" + std::to_string(count) + " threads of block " + key;
    fail(why);
}

void add_stack()
{
    static char *memory, *end;
    if (memory == end) {
        const int count = 64;
        memory = (char *)mmap(nullptr, count * STACK, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED)
            fail("no memory for stacks");
        end = memory + count * STACK;
    }
    mprotect(memory, PAGE, PROT_NONE); // so that an overflow shows
    // Tops at equal offsets in their pages would share few lines of the processor's cache.
    int size = STACK - stacks.size() % 61 * 448;
    stacks.push_back({memory, size, {}});
    make_idle(stacks.back());
    memory += STACK;
}

// Make a thread the running one, and return where it goes on.
inline context &place_to_run(thread *t)
{
    self = running = t;
    if (t->on)
        return t->here;
    if (idle_stacks.empty())
        add_stack();
    t->on = idle_stacks.back();
    idle_stacks.pop_back();
    return t->on->idle;
}

// Run the others until this thread, which is in some queue, is the first of `ready`.
inline void switch_threads()
{
    thread *me = running, *next = ready.take();
    if (!next)
        fail_waiting();
    if (next != me)
        switch_context(me->here, place_to_run(next));
}

inline void wait_in(queue &waiting, const char *function, int at)
{
    running->waits_in = function;
    running->at = at;
    waiting.append(running);
    switch_threads();
    running->waits_in = nullptr;
}

void release(barrier &b)
{
    b.arrived = 0;
    for (thread *t = b.waiting.first; t; t = t->next)
        acquire_from(b.clock, t);
    b.clock.clear();
    ready.append(b.waiting);
    fruitless = 0;
}

void end_block(block &b)
{
    if (!b.ranges.empty())
        fail_here("the block ends with ranges under way");
    for (size_t i = b.memory.size() - MARGIN; i < b.memory.size(); i++)
        if ((unsigned char)b.memory[i] != GARBAGE)
            fail_here("the block wrote beyond its shared memory");
}

void end_thread()
{
    block &b = *running->of;
    running->of = nullptr;
    unfinished--;
    fruitless = 0;
    if (--b.running == 0)
        end_block(b);
    else if (b.barriers[0].arrived == b.running)
        release(b.barriers[0]);
}

// Run threads from their start to their end.
void run_threads()
{
    for (;;) {
        kernel(arguments);
        end_thread();
        stack *here = running->on;
        thread *next = ready.take();
        if (!next && unfinished)
            fail_waiting();
        if (next && !next->on) {
            next->on = here;
            self = running = next;
            continue;
        }
        idle_stacks.push_back(here);
        switch_context(here->idle, next ? place_to_run(next) : launcher);
    }
}

void reset(block &b, int count, int shared)
{
    b.running = count;
    b.size = shared;
    b.clocks.clear();
    for (barrier &one : b.barriers)
        one = {};
    b.warps.assign((count + LANES - 1) / LANES, {});
    b.ranges.clear();
    b.unpublished.clear();
    b.memory.assign(shared + ALIGNMENT + MARGIN, (char)GARBAGE);
}

// Make the threads of a block ready, the threads from number `first` on.
void start_block(block &b, int first, place index, int shared)
{
    int count = block_size.x * block_size.y * block_size.z, number = 0;
    reset(b, count, shared);
    // The margin follows directly.
    char *aligned = (char *)(((uintptr_t)b.memory.data() + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    b.memory.resize(aligned - b.memory.data() + shared + MARGIN);
    for (unsigned z = 0; z < block_size.z; z++)
        for (unsigned y = 0; y < block_size.y; y++)
            for (unsigned x = 0; x < block_size.x; x++, number++) {
                thread &t = threads[first + number];
                (identity &)t = {{x, y, z}, index, (unsigned)number % LANES, aligned};
                t.on = nullptr;
                t.of = &b;
                t.number = first + number;
                t.warp = number / LANES;
                t.waits_in = nullptr;
                t.copies.clear();
                t.groups = 0;
                ready.append(&t);
            }
    unfinished += count;
    begin_block(b, first, count);
}

// An address that is not mapped, or not aligned.
void on_fault(int, siginfo_t *info, void *)
{
    char where[40];
    snprintf(where, sizeof where, "bad address %p", info->si_addr);
    fail_here(where);
}

// Run all threads that are ready; return whether they ended.
bool run_ready()
{
    fruitless = 0;
    switch_context(launcher, place_to_run(ready.take()));
    return error.empty();
}

place place_of(unsigned number)
{
    return {number % grid_size.x, number / grid_size.x % grid_size.y,
            number / grid_size.x / grid_size.y};
}

// Start as many blocks as are to be alive at once, until all have ended.
void run_blocks(unsigned count, unsigned at_once, int shared, bool backwards)
{
    unsigned size = block_size.x * block_size.y * block_size.z;
    for (unsigned first = 0; first < count; first += at_once) {
        for (unsigned i = 0; i < at_once; i++)
            start_block(blocks[i], i * size, place_of(first + i), shared);
        if (backwards)
            ready.reverse();
        if (!run_ready())
            return;
    }
}

} // namespace

const unsigned long long *meet_lanes(unsigned long long brought, const char *function)
{
    warp &w = running->of->warps[running->warp];
    unsigned long long *all = w.brought[w.turn];
    if (w.lanes.arrived && w.lanes.function != function && strcmp(w.lanes.function, function))
        fail_here(std::string("a lane is in ") + function + ", another in " + w.lanes.function);
    w.lanes.function = function;
    bool orders_memory = !strcmp(function, "sync_warp");
    if (orders_memory)
        release_into(w.lanes.clock);
    all[running->lane] = brought;
    all[LANES] |= (brought & 1) << running->lane;
    if (++w.lanes.arrived < LANES)
        wait_in(w.lanes.waiting, function, 0);
    else {
        w.turn ^= 1;
        w.brought[w.turn][LANES] = 0;
        w.lanes.arrived = 0;
        if (orders_memory) {
            acquire_from(w.lanes.clock);
            for (thread *t = w.lanes.waiting.first; t; t = t->next)
                acquire_from(w.lanes.clock, t);
            w.lanes.clock.clear();
        }
        ready.prepend(w.lanes.waiting); // a warp that goes on finds its stacks in the cache
    }
    return all;
}

static bool is_last(barrier &b, int number, int threads)
{
    if (number < 0 || number >= BARRIERS || threads % LANES || (number == 0) != (threads == 0))
        fail_here("there is no such barrier");
    if (b.arrived && b.threads != threads)
        fail_here("a barrier of different numbers of threads");
    b.threads = threads;
    release_into(b.clock);
    return ++b.arrived == (number ? threads : running->of->running);
}

void wait_at(int number, int threads)
{
    barrier &b = running->of->barriers[number & (BARRIERS - 1)];
    if (is_last(b, number, threads)) {
        acquire_from(b.clock);
        release(b);
    } else
        wait_in(b.waiting, number ? "sync_threads" : "sync_block", number);
}

void yield(const char *function)
{
    if (++fruitless > PATIENCE) {
        running->waits_in = function;
        fail_waiting();
    }
    wait_in(ready, function, 0);
}

static std::map<const unsigned *, moments> counters; // their clocks

void add_released(unsigned *counter, unsigned number)
{
    fruitless = 0;
    release_into(counters[counter]);
    *counter += number;
}

unsigned load_acquired(const unsigned *counter)
{
    yield("load_acquired");
    acquire_from(counters[counter]);
    return *counter;
}

} // namespace emulated

// Run a kernel; the threads start in order, or backwards. Return an error, or NULL.
extern "C" const char *emulated_launch(void (*kernel)(void **), void **arguments,
                                       const unsigned *grid, const unsigned *block, int shared,
                                       int together, int backwards, int watch)
{
    using namespace emulated;
    emulated::kernel = kernel;
    emulated::arguments = arguments;
    grid_size = {grid[0], grid[1], grid[2]};
    block_size = {block[0], block[1], block[2]};
    unsigned size = block[0] * block[1] * block[2], count = grid[0] * grid[1] * grid[2];
    unsigned at_once = together ? count : 1;
    if (threads.size() < at_once * size)
        threads.resize(at_once * size);
    if (blocks.size() < at_once)
        blocks.resize(at_once);
    for (thread &t : threads)
        t.of = nullptr;
    error.clear();
    ready = {};
    unfinished = 0;
    counters.clear();
    begin_races(watch, at_once * size);

    static char fault_stack[1 << 15]; // that of a thread may be full
    stack_t own = {fault_stack, 0, sizeof fault_stack}, kept;
    struct sigaction action = {}, segv, bus;
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaltstack(&own, &kept);
    sigaction(SIGSEGV, &action, &segv);
    sigaction(SIGBUS, &action, &bus);
    run_blocks(count, at_once, shared, backwards);
    sigaction(SIGBUS, &bus, nullptr);
    sigaction(SIGSEGV, &segv, nullptr);
    sigaltstack(&kept, nullptr);
    if (error.empty())
        error = races();
    return error.empty() ? nullptr : error.c_str();
}
