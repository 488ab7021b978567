/* The functions that Python calls. Python has checked shapes, types and strides.
 *
 * An operation takes its struct, described in kernels.h, and the number of threads. It returns 0,
 * or 1 if a number in an array is out of range. */
#ifndef GPT_CLI_NATIVE_H
#define GPT_CLI_NATIVE_H

#include "kernels.h"
#include "system.h"

/* Constants that bindings.py reads, or compares with those in Python. */
struct layout {
    int64_t version; /* of this interface */
    int64_t columns, group, max_tile_rows, row_padding, digits_bytes, formats;
    const struct storage *storage;
    int64_t sizes[20]; /* of the structs in bindings.py, in its order */
};
EXPORT extern const struct layout gpt2_layout;

/* Return the digest of the sources of this library: see `sources_digest` in system/library.py. */
EXPORT const char *gpt2_sources(void);

/* Return whether this processor supports the level of this name. */
EXPORT int gpt2_has_level(const char *name);

/* Use this level for all later calls. */
EXPORT void gpt2_use_level(const char *name);

EXPORT int gpt2_embed(const struct embed *embed, int threads);
EXPORT int gpt2_layer_norm(const struct layer_norm *norm, int threads);
EXPORT int gpt2_linear(const struct linear *linear, int threads);
EXPORT int gpt2_store(const struct store *store, int threads);
EXPORT int gpt2_narrow(const struct narrow *narrow, int threads);
EXPORT int gpt2_attend(const struct attend *attend, int threads);
EXPORT int gpt2_layers(const struct layers *layers, int threads);
EXPORT int gpt2_draft(const struct draft *draft, int threads);
EXPORT int gpt2_log_sum_exp(const struct log_sum_exp *sums, int threads);
EXPORT int gpt2_exp(const struct exp *exp, int threads);
EXPORT int gpt2_activate(const struct activate *activate, int threads);
EXPORT int gpt2_cumulate(const struct cumulate *cumulate, int threads);
EXPORT int gpt2_choose(const struct choose *choose, int threads);
EXPORT int gpt2_quantize(const struct quantize *quantize, int threads);
int gpt2_add(const struct add *add, int threads);

/* Return the size of the scratch memory of `gpt2_layers` in floats. */
EXPORT int64_t gpt2_layers_scratch(const struct layers *layers, int threads);

/* Return the number of ranges that `gpt2_linear` cuts the panels of its matrix into. */
EXPORT int64_t gpt2_linear_ranges(const struct linear *linear, int threads);

/* Pack rows on one thread. Return 0; -2 for int8 that `gpt-cli quantize` does not write: a weight of
 * -128, a scale that bfloat16 cannot hold, or no scales. */
EXPORT int gpt2_pack(const struct pack *pack, int threads);

/* Read rows from files and pack them, on one thread, until no part is left. The `error` of a part is as
 * `gpt2_pack` returns it; or -1 if the file ends too early, or an errno. After an error, no thread takes
 * another part. Return 0, or 1 after an error of this thread. */
EXPORT int gpt2_read(struct read *read, int threads);

#endif
