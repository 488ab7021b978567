/* What systems do differently: see system.h. A file of its own, because names in windows.h clash with
 * those of kernels.h. */
#define _GNU_SOURCE
#include "system.h"

#include <errno.h>
#include <pthread.h>

enum { STACK_BYTES = 512 << 10 };

static bool start_detached(void *(*function)(void *), void *argument)
{
    pthread_t thread;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    int error = pthread_create(&thread, &attributes, function, argument);
    pthread_attr_destroy(&attributes);
    return !error;
}

/* --- Windows ------------------------------------------------------------------------------------ */
#ifdef _WIN32

#include <io.h>
#include <windows.h>

/* Windows runs the handler of Ctrl-C in a thread of its own. */
bool start_thread(void *(*function)(void *), void *argument)
{
    return start_detached(function, argument);
}

void call_after_fork(void (*in_child)(void)) { (void)in_child; } /* there is no fork */

/* The descriptor is Python's: this library and Python share Windows' C runtime. */
int64_t read_at(int file, void *to, int64_t size, int64_t offset)
{
    OVERLAPPED at = {.Offset = (DWORD)offset, .OffsetHigh = (DWORD)(offset >> 32)};
    DWORD most = size < 1 << 30 ? (DWORD)size : 1 << 30, count = 0;
    if (ReadFile((HANDLE)_get_osfhandle(file), to, most, &count, &at))
        return count;
    if (GetLastError() == ERROR_HANDLE_EOF)
        return 0;
    errno = EIO;
    return -1;
}

#else
/* --- Linux and macOS ---------------------------------------------------------------------------- */

#include <signal.h>
#include <unistd.h>

bool start_thread(void *(*function)(void *), void *argument)
{
    /* Leave signals to Python's threads, except those that an instruction raises: while
     * they are blocked, the handler of faulthandler could not run. */
    static const int raised_by_instructions[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    sigset_t blocked, old;
    sigfillset(&blocked);
    for (int i = 0; i < 4; i++)
        sigdelset(&blocked, raised_by_instructions[i]);
    pthread_sigmask(SIG_SETMASK, &blocked, &old); /* a new thread inherits it */
    bool started = start_detached(function, argument);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return started;
}

void call_after_fork(void (*in_child)(void)) { pthread_atfork(NULL, NULL, in_child); }

int64_t read_at(int file, void *to, int64_t size, int64_t offset)
{
    return pread(file, to, size, offset);
}

#endif
/* --- processors --------------------------------------------------------------------------------- */
#if defined(__x86_64__)

#include <cpuid.h>

uint64_t saved_registers(void)
{
    unsigned a, b, c = 0, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE))
        return 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    uint64_t saved = (uint64_t)high << 32 | low;
#ifdef __APPLE__
    saved |= 0xE0; /* those of AVX-512: macOS saves them once a thread has used them */
#endif
    return saved;
}

#elif defined(_WIN32)

bool has_dot_products(void) { return IsProcessorFeaturePresent(43); } /* PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE */

#elif defined(__linux__)

#include <sys/auxv.h>

bool has_dot_products(void) { return getauxval(AT_HWCAP) >> 20 & 1; } /* HWCAP_ASIMDDP */

#else

bool has_dot_products(void) { return true; } /* every Apple processor that runs macOS has them */

#endif
