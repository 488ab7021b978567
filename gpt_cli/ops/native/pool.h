/* A thread pool that shares the parts of a job. */
#ifndef GPT_CLI_POOL_H
#define GPT_CLI_POOL_H

#include "kernels.h"

/* Call `function` for all parts of a job on up to `threads` threads, including the calling one.
 * Return when all parts are done. Parts run in any order and must not wait for one another. */
void run_parts(part_function *function, const void *job, int64_t parts, int threads);

#endif
