/* Threads that share the parts of a job. */
#ifndef GPT_CLI_POOL_H
#define GPT_CLI_POOL_H

#include "kernels.h"

/* Call `function` for each part of a job, on up to `threads` threads, this one among them. Return
 * when all parts are done. Parts may run in any order, and must not need one another. */
void run_parts(part_function *function, const void *job, int64_t parts, int threads);

#endif
