/* A thread pool that is created on first use and kept.
 *
 * Threads take parts of a job by incrementing `ticket`. The caller waits only for threads that hold a
 * part, so a thread that is preempted before it takes one delays nothing. An idle thread spins for
 * SPIN_NS, then sleeps.
 */
#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <time.h>

#include "system.h"

enum {
    MAX_WORKERS = 255,
    PART_BITS = 20, /* a ticket: job number (24 bits), number of parts (20), next part (20) */
    SPIN_NS = 100000,
};

#define PART_MASK ((UINT64_C(1) << PART_BITS) - 1)

static struct {
    /* The current job's number, its number of parts, and the next part, in one word: if the
     * compare-and-swap that takes a part succeeds, the job has not changed since it was read. */
    _Atomic uint64_t ticket;
    _Atomic(part_function *) function;
    _Atomic(const void *) job;
    _Atomic int threads;
    _Atomic int64_t done; /* parts of the current job */
    _Atomic int sleeping;
    pthread_mutex_t sleep;
    pthread_cond_t wake;
    pthread_mutex_t in_use; /* held by the thread that called `run_parts` */
    int workers;
} pool = {
    .sleep = PTHREAD_MUTEX_INITIALIZER,
    .wake = PTHREAD_COND_INITIALIZER,
    .in_use = PTHREAD_MUTEX_INITIALIZER,
};

static void pause_briefly(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static int64_t part_count(uint64_t ticket) { return ticket >> PART_BITS & PART_MASK; }
static int64_t next_part(uint64_t ticket) { return ticket & PART_MASK; }
static bool has_parts(uint64_t ticket) { return next_part(ticket) < part_count(ticket); }

/* Take a part of the current job and run it. Return false if no part is left for this slot. */
static bool do_part(int slot)
{
    uint64_t ticket = atomic_load(&pool.ticket);
    /* These do not change while a part is left. If another thread takes the last part, the exchange
     * below fails, and these values are not used. */
    part_function *function = atomic_load_explicit(&pool.function, memory_order_relaxed);
    const void *job = atomic_load_explicit(&pool.job, memory_order_relaxed);
    int threads = atomic_load_explicit(&pool.threads, memory_order_relaxed);
    if (!has_parts(ticket) || slot >= threads)
        return false;
    if (atomic_compare_exchange_strong(&pool.ticket, &ticket, ticket + 1)) {
        function(job, next_part(ticket), slot);
        atomic_fetch_add(&pool.done, 1);
    }
    return true;
}

static void *work(void *argument)
{
    int slot = (int)(intptr_t)argument;
    for (;;) {
        while (do_part(slot))
            continue;
        uint64_t seen = atomic_load(&pool.ticket);
        int64_t until = nanoseconds() + SPIN_NS;
        while (!has_parts(seen) && nanoseconds() < until) {
            for (int i = 0; i < 16; i++)
                pause_briefly();
            seen = atomic_load(&pool.ticket);
        }
        if (has_parts(seen) && slot < atomic_load(&pool.threads))
            continue;
        pthread_mutex_lock(&pool.sleep);
        atomic_fetch_add(&pool.sleeping, 1);
        /* Either the caller that publishes a job sees `sleeping`, or this thread sees the job. */
        while (!has_parts(atomic_load(&pool.ticket)) || slot >= atomic_load(&pool.threads))
            pthread_cond_wait(&pool.wake, &pool.sleep);
        atomic_fetch_sub(&pool.sleeping, 1);
        pthread_mutex_unlock(&pool.sleep);
    }
    return NULL;
}

/* Reset the pool in the child of a fork, which has none of the threads. */
static void forget_threads(void)
{
    pthread_mutex_init(&pool.sleep, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_mutex_init(&pool.in_use, NULL);
    atomic_store(&pool.sleeping, 0);
    atomic_store(&pool.ticket, 0);
    pool.workers = 0;
}

/* Start workers until there are `wanted`, or the system refuses one. */
static void start_workers(int wanted)
{
    if (pool.workers >= wanted || pool.workers == MAX_WORKERS)
        return;
    static bool prepared;
    if (!prepared)
        call_after_fork(forget_threads);
    prepared = true;
    while (pool.workers < wanted && pool.workers < MAX_WORKERS) {
        intptr_t slot = pool.workers + 1;
        if (!start_thread(work, (void *)slot))
            break;
        pool.workers++;
    }
}

void run_parts(part_function *function, const void *job, int64_t parts, int threads)
{
    bool alone = threads <= 1 || parts <= 1 || parts > (int64_t)PART_MASK; /* too many for a ticket */
    if (alone || pthread_mutex_trylock(&pool.in_use)) { /* or the pool is in use */
        for (int64_t part = 0; part < parts; part++)
            function(job, part, 0);
        return;
    }
    start_workers(threads - 1);
    atomic_store_explicit(&pool.function, function, memory_order_relaxed);
    atomic_store_explicit(&pool.job, job, memory_order_relaxed);
    atomic_store_explicit(&pool.threads, threads, memory_order_relaxed);
    atomic_store_explicit(&pool.done, 0, memory_order_relaxed);
    uint64_t number = (atomic_load(&pool.ticket) >> 2 * PART_BITS) + 1;
    atomic_store(&pool.ticket, number << 2 * PART_BITS | (uint64_t)parts << PART_BITS);
    if (atomic_load(&pool.sleeping)) {
        pthread_mutex_lock(&pool.sleep);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.sleep);
    }
    while (do_part(0))
        continue;
    int64_t yield_after = nanoseconds() + SPIN_NS;
    while (atomic_load(&pool.done) < parts) {
        pause_briefly();
        if (nanoseconds() > yield_after)
            sched_yield(); /* a preempted thread that holds a part may need this core */
    }
    pthread_mutex_unlock(&pool.in_use);
}
