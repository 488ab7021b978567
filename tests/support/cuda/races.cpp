// See races.h. What calls it is at the end: the functions that GCC's `-fsanitize=thread` calls before
// each access to memory.

#include "races.h"

#include <algorithm>
#include <cstdio>
#include <set>
#include <unordered_map>

#include <dlfcn.h>

namespace emulated {
namespace {

// An access: a thread, and its moment.
struct access {
    int thread;
    uint32_t moment;
};

// What is known of a byte.
struct cell {
    access written = {-1, 0}; // the last write
    int wave;                 // of blocks, in which it was written
    std::vector<access> reads; // since then; some of a thread may be there twice
    const void *write_code, *read_code; // the places in the code
};

constexpr size_t MOST = 40, BYTES = 1 << 12;
bool watching;
int wave;                   // blocks of another wave are in no order with those of this one
std::vector<moments> clocks; // of the threads
std::unordered_map<const block *, std::vector<cell>> shared;
std::unordered_map<uintptr_t, std::vector<cell>> written_pages;
std::set<std::string> messages;

// The name of a place in the code: addr2line knows the line.
std::string name_of(const void *code)
{
    Dl_info info;
    char name[300] = "?";
    if (dladdr(code, &info))
        snprintf(name, sizeof name, "%s+0x%zx", info.dli_fname, (char *)code - (char *)info.dli_fbase - 1);
    return name;
}

void report(const char *kind, const void *first, const void *second)
{
    if (messages.size() < MOST)
        messages.insert(std::string(kind) + name_of(first) + " " + name_of(second));
}

bool is_before(const access &other)
{
    return other.moment <= clocks[running->number][other.thread];
}

access this_access() { return {running->number, clocks[running->number][running->number]}; }

// The byte of shared memory at an address, or NULL if it is elsewhere.
cell *shared_cell(uintptr_t at)
{
    size_t offset = at - (uintptr_t)running->shared;
    std::vector<cell> &cells = shared[running->of];
    return offset < cells.size() ? &cells[offset] : nullptr;
}

bool is_on_stack(uintptr_t at)
{
    return at - (uintptr_t)running->on->memory < (uintptr_t)running->on->size;
}

bool has_race(const cell &c)
{
    return c.written.thread >= 0 && (c.wave != wave || !is_before(c.written));
}

void check_readers(cell &c, const void *code)
{
    for (const access &read : c.reads)
        if (!is_before(read)) {
            report("read, then written: ", c.read_code, code);
            break;
        }
    c.reads.clear();
}

void write(cell &c, const void *code)
{
    if (has_race(c))
        report("written twice: ", c.write_code, code);
    check_readers(c, code);
    c.written = this_access();
    c.write_code = code;
    c.wave = wave;
}

void read(cell &c, const void *code, bool is_kept)
{
    if (has_race(c))
        report("written, then read: ", c.write_code, code);
    if (!is_kept)
        return;
    if (c.reads.empty() || c.reads.back().thread != running->number)
        c.reads.push_back(this_access());
    else
        c.reads.back() = this_access();
    c.read_code = code;
}

} // namespace

void begin_races(bool watch, int threads)
{
    watching = watch;
    wave = 0;
    shared.clear();
    written_pages.clear();
    messages.clear();
    if (watch)
        clocks.assign(threads, moments(threads));
}

void begin_block(const block &b, int first_thread, int threads)
{
    if (!watching)
        return;
    if (first_thread == 0) {
        wave++;
        for (moments &clock : clocks)
            std::fill(clock.begin(), clock.end(), 0);
        for (size_t i = 0; i < clocks.size(); i++)
            clocks[i][i] = 1;
    }
    shared[&b].assign(b.size, {});
}

void join(moments &clock, const moments &other)
{
    if (clock.size() < other.size())
        clock.resize(other.size());
    for (size_t i = 0; i < other.size(); i++)
        clock[i] = std::max(clock[i], other[i]);
}

void release_into(moments &clock)
{
    if (!watching)
        return;
    moments &mine = clocks[running->number];
    join(clock, mine);
    mine[running->number]++;
}

void acquire_from(const moments &clock, thread *t)
{
    if (watching)
        join(clocks[t->number], clock);
}

void acquire_from(const moments &clock) { acquire_from(clock, running); }

static void note(const void *at, int size, bool is_write, const void *code)
{
    if (!watching)
        return;
    uintptr_t start = (uintptr_t)at;
    if (cell *first = shared_cell(start)) {
        for (int i = 0; i < size; i++)
            is_write ? write(first[i], code) : read(first[i], code, true);
        return;
    }
    if (is_on_stack(start))
        return;
    for (uintptr_t byte = start; byte < start + size; byte++) {
        auto page = written_pages.find(byte / BYTES);
        if (page == written_pages.end()) {
            if (!is_write)
                return;
            page = written_pages.emplace(byte / BYTES, BYTES).first;
        }
        cell &c = page->second[byte % BYTES];
        is_write ? write(c, code) : read(c, code, false);
    }
}

void note_write(const void *at, int size) { note(at, size, true, __builtin_return_address(0)); }
void note_read(const void *at, int size) { note(at, size, false, __builtin_return_address(0)); }

std::string races()
{
    std::string all;
    for (const std::string &message : messages)
        all += message + "\n";
    return all;
}

} // namespace emulated

#define ACCESS(name, size, is_write)                                  \
    extern "C" void __tsan_##name(void *at)                           \
    {                                                                 \
        emulated::note(at, size, is_write, __builtin_return_address(0)); \
    }
#define ACCESSES(size)                        \
    ACCESS(read##size, size, false)           \
    ACCESS(write##size, size, true)           \
    ACCESS(unaligned_read##size, size, false) \
    ACCESS(unaligned_write##size, size, true)
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

extern "C" void __tsan_read_range(void *at, size_t size)
{
    emulated::note(at, size, false, __builtin_return_address(0));
}
extern "C" void __tsan_write_range(void *at, size_t size)
{
    emulated::note(at, size, true, __builtin_return_address(0));
}
extern "C" void __tsan_func_entry(void *) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_init() {}
