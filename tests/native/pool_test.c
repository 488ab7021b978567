/* Stress-test the thread pool: `pool_test SECONDS [BUSY]`, beside BUSY busy processes.
 *
 * All parts of a job must run exactly once, a slot must have one thread, and the caller must see
 * all writes of the parts. The counters are plain integers on purpose: TSan reports every race that
 * the pool does not prevent.
 *
 * Everything runs twice. The second time, random delays between the steps of the pool provoke
 * interleavings that are otherwise rare.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>

static void delay(void);

#undef atomic_load
#undef atomic_compare_exchange_strong
#define atomic_load(from) (delay(), atomic_load_explicit(from, memory_order_seq_cst))
#define atomic_compare_exchange_strong(at, old, new) \
    (delay(), \
     atomic_compare_exchange_strong_explicit( \
         at, old, new, memory_order_seq_cst, memory_order_seq_cst))
#define pthread_mutex_lock(mutex) (delay(), pthread_mutex_lock(mutex))
#define pthread_cond_wait(condition, mutex) (delay(), pthread_cond_wait(condition, mutex))
#include "pool.c"
#undef atomic_load
#define atomic_load(from) atomic_load_explicit(from, memory_order_seq_cst)

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    MOST_THREADS = 16,
    LARGEST_JOB = 500,
    CALLERS = 4,
    TIMEOUT = 10, /* seconds for a woken thread to arrive */
};

static _Atomic bool stop;

static void fail(const char *what, long long number)
{
    fprintf(stderr, "pool_test: %s: %lld\n", what, number);
    _exit(1);
}

static double seconds(void) { return 1e-9 * (double)nanoseconds(); }

/* Return a random number from 0 to n - 1 (xorshift). */
static int64_t draw(uint64_t *state, int64_t n)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return (int64_t)(*state >> 1) % n;
}

static _Atomic bool delays;

/* Sometimes wait up to 10 or 200 us, or yield to other threads. */
static void delay(void)
{
    static _Thread_local uint64_t state;
    if (!atomic_load_explicit(&delays, memory_order_relaxed))
        return;
    if (!state)
        state = (uintptr_t)&state;
    if (!draw(&state, 1000))
        sched_yield();
    if (draw(&state, 50))
        return;
    int64_t most = draw(&state, 8) ? 10000 : 200000;
    for (int64_t until = nanoseconds() + draw(&state, most); nanoseconds() < until;)
        continue;
}

/* --- all parts exactly once ---------------------------------------------------------------------- */

struct count {
    int *done;  /* by part */
    int *users; /* by slot */
    int threads, work;
};

static void count_part(const void *argument, int64_t part, int slot)
{
    const struct count *job = argument;
    if (slot < 0 || slot >= job->threads)
        fail("invalid slot", slot);
    if (++job->users[slot] != 1)
        fail("two threads in slot", slot);
    for (volatile int i = 0; i < job->work; i++)
        continue;
    job->done[part]++;
    job->users[slot]--;
}

/* Run one job of a random number of parts, on a random number of threads, and check it. */
static void run_one(uint64_t *state)
{
    int done[LARGEST_JOB] = {0}, users[MOST_THREADS] = {0};
    int64_t parts = draw(state, 8) ? draw(state, 6) : draw(state, LARGEST_JOB);
    struct count job = {
        .done = done,
        .users = users,
        .threads = 1 + (int)draw(state, MOST_THREADS),
        .work = draw(state, 2) ? 0 : (int)draw(state, 4000),
    };
    run_parts(count_part, &job, parts, job.threads);
    for (int64_t part = 0; part < LARGEST_JOB; part++)
        if (done[part] != (part < parts))
            fail("a part did not run exactly once", part);
    /* A thread that still used this job would crash on its null pointers. */
    memset(&job, 0, sizeof job);
}

static void *call_often(void *argument)
{
    uint64_t state = (uintptr_t)argument;
    while (!atomic_load(&stop))
        run_one(&state);
    return NULL;
}

/* Run jobs from several threads at once for `time` seconds. */
static void test_callers(int callers, double time)
{
    pthread_t threads[CALLERS];
    atomic_store(&stop, false);
    for (int i = 0; i < callers; i++)
        if (pthread_create(&threads[i], NULL, call_often, (void *)(uintptr_t)(i + 1)))
            fail("no thread", i);
    usleep((useconds_t)(time * 1e6));
    atomic_store(&stop, true);
    for (int i = 0; i < callers; i++)
        pthread_join(threads[i], NULL);
}

/* --- no wake-up is lost -------------------------------------------------------------------------- */

/* A part that waits for the other part of its job, which real parts must not do. */
static void meet(const void *argument, int64_t part, int slot)
{
    _Atomic int *present = *(_Atomic int *const *)argument;
    double until = seconds() + TIMEOUT;
    (void)part;
    (void)slot;
    atomic_fetch_add(present, 1);
    while (atomic_load(present) < 2)
        if (seconds() > until)
            fail("no other thread arrived within seconds", TIMEOUT);
        else
            sched_yield();
}

/* Pause for about as long as threads spin before they sleep; then run a job that needs two. */
static void meet_once(uint64_t *state, int most_threads)
{
    _Atomic int count = 0, *present = &count;
    for (int64_t until = nanoseconds() + draw(state, 3 * SPIN_NS); nanoseconds() < until;)
        continue;
    run_parts(meet, &present, 2, 2 + (int)draw(state, most_threads - 1));
}

/* Test wake-ups. At first use only one other thread, which no third thread can stand in for. */
static void test_wakes(double time)
{
    uint64_t state = 88172645463325252;
    double start = seconds();
    while (seconds() < start + time / 2)
        meet_once(&state, 2);
    while (seconds() < start + time)
        meet_once(&state, MOST_THREADS);
}

/* --- forks ------------------------------------------------------------------------------------- */

static void await(pid_t child)
{
    int status;
    if (child < 0)
        fail("no fork", child);
    waitpid(child, &status, 0);
    if (status)
        fail("a child ended with", status);
}

/* Fork, also in the child; all processes must start threads. */
static void fork_and_run(uint64_t *state, int depth)
{
    pid_t child = fork();
    if (!child) {
        alarm(6 * TIMEOUT);
        for (int i = 0; i < 20; i++)
            run_one(state);
        meet_once(state, MOST_THREADS);
        if (depth)
            fork_and_run(state, depth - 1);
        _exit(0);
    }
    await(child);
}

/* Fork while another thread is in the middle of a job. */
static void test_forks(double time)
{
    pthread_t caller;
    uint64_t state = 1;
    atomic_store(&stop, false);
    if (pthread_create(&caller, NULL, call_often, (void *)(uintptr_t)7))
        fail("no thread", 1);
    for (double until = seconds() + time; seconds() < until;)
        fork_and_run(&state, 1);
    atomic_store(&stop, true);
    pthread_join(caller, NULL);
    run_one(&state);
}

static void keep_busy(int processes, double time)
{
    double until = seconds() + time;
    while (processes--)
        if (!fork()) {
            while (seconds() < until)
                continue;
            _exit(0);
        }
}

/* All tests, in a process that has no threads yet. */
static void test_all(double time, bool with_delays)
{
    pid_t child = fork();
    if (!child) {
        alarm((unsigned)time + 12 * TIMEOUT);
        atomic_store(&delays, with_delays);
        test_wakes(time / 4);
        test_callers(1, time / 4);
        test_callers(CALLERS, time / 4);
        test_forks(time / 4);
        _exit(0);
    }
    await(child);
}

int main(int count, char **arguments)
{
    double time = count > 1 ? atof(arguments[1]) : 4;
    keep_busy(count > 2 ? atoi(arguments[2]) : 0, time);
    test_all(time / 2, false);
    test_all(time / 2, true);
    return 0;
}
