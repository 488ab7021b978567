/* What systems do differently: Linux, macOS and Windows. */
#ifndef GPT_CLI_SYSTEM_H
#define GPT_CLI_SYSTEM_H

#include <stdbool.h>
#include <stdint.h>

/* Of what Python calls; everything else is hidden. */
#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* Start a thread that nothing waits for, and that leaves signals to other threads. Return whether
 * the system starts it. */
bool start_thread(void *(*function)(void *), void *argument);

/* Call a function in the child of each fork. */
void call_after_fork(void (*in_child)(void));

/* Read up to `size` bytes of a file (a descriptor) from an offset on. Return their number, 0 at the
 * end of the file, or -1 with an errno. */
int64_t read_at(int file, void *to, int64_t size, int64_t offset);

#if defined(__x86_64__)
/* Return the registers that the system saves for each thread, as XCR0 has them; 0 if it has none. */
uint64_t saved_registers(void);
#else
/* Return whether the processor multiplies bytes (the extension DotProd of ARMv8.2). */
bool has_dot_products(void);
#endif

#endif
