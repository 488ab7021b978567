// Copies of emulated threads, made as late as possible. Until then, their targets are garbage.

#include "races.h"

#include <cstring>

namespace emulated {

static phases *checked(void *barrier)
{
    phases *p = (phases *)barrier;
    if (p->state != INITIALIZED && p->state != PUBLISHED)
        fail_here("this barrier has no phases yet");
    return p;
}

static void check_copy(void *to, const void *from)
{
    if ((uintptr_t)to % 16 || (uintptr_t)from % 16)
        fail_here("copies need multiples of 16 bytes");
}

void copy16(void *to, const void *from)
{
    check_copy(to, from);
    note_read(from, 16);
    note_write(to, 16);
    memset(to, GARBAGE, 16);
    running->copies.push_back({(char *)to, (const char *)from, running->groups});
}

void commit_copies() { running->groups++; }

void wait_for_copies(int groups)
{
    std::vector<copy> &copies = running->copies;
    size_t done = 0;
    for (; done < copies.size() && copies[done].group < running->groups - groups; done++)
        memcpy(copies[done].to, copies[done].from, 16);
    copies.erase(copies.begin(), copies.begin() + done);
}

void init_phases(void *barrier, int count)
{
    note_write(barrier, sizeof(phases));
    *(phases *)barrier = {0, (uint16_t)count, 0, INITIALIZED};
    running->of->unpublished.push_back((phases *)barrier);
}

void publish_phases()
{
    for (phases *p : running->of->unpublished)
        p->state = PUBLISHED;
    running->of->unpublished.clear();
}

// Fail if there are as many arrivals, and copies that will arrive, as the phase counts.
static void check_arrival(const phases *p)
{
    int arriving = 0;
    for (range &r : running->of->ranges)
        arriving += r.ends_in == p;
    if (p->arrived + arriving >= p->count)
        fail_here("more threads arrive than the phase counts");
}

// Count an arrival, of a thread with this clock or of its copy.
static void count_arrival(phases *p, const moments &clock)
{
    fruitless = 0;
    phase_clocks &clocks = running->of->clocks[p];
    join(clocks.arriving, clock);
    if (++p->arrived == p->count) {
        p->arrived = 0;
        p->ended++;
        clocks.ended = clocks.arriving;
    }
}

static void copy_and_arrive(const range &r)
{
    for (int at = r.lane * 16; at < r.bytes; at += r.lanes * 16)
        memcpy(r.to + at, r.from + at, 16);
    check_arrival(r.ends_in);
    count_arrival(r.ends_in, r.clock);
}

void arrive(void *barrier)
{
    phases *p = checked(barrier);
    check_arrival(p);
    moments clock;
    release_into(clock);
    count_arrival(p, clock);
}

bool has_ended(void *barrier, unsigned parity)
{
    phases *p = checked(barrier);
    if ((p->ended & 1) != parity) {
        acquire_from(running->of->clocks[p].ended);
        return true;
    }
    std::vector<range> &ranges = running->of->ranges;
    for (size_t i = 0; i < ranges.size();)
        if (ranges[i].ends_in == p) {
            range r = ranges[i];
            ranges.erase(ranges.begin() + i);
            copy_and_arrive(r);
        } else
            i++;
    yield("has_ended");
    return false;
}

void copy_range(void *to, const void *from, int bytes, void *barrier, int lane, int lanes)
{
    phases *p = checked(barrier);
    check_copy(to, from);
    if (lanes == 1 && p->state != PUBLISHED)
        fail_here("the processor of copies does not see this barrier");
    if (bytes <= 0 || bytes % 16)
        fail_here("a range is a multiple of 16 bytes");
    check_arrival(p);
    for (int at = lane * 16; at < bytes; at += lanes * 16) {
        note_read((const char *)from + at, 16);
        note_write((char *)to + at, 16);
        memset((char *)to + at, GARBAGE, 16);
    }
    moments clock;
    release_into(clock);
    running->of->ranges.push_back({(char *)to, (const char *)from, bytes, lane, lanes, p, clock});
}

} // namespace emulated
