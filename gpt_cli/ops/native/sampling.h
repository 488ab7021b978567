/* The choice of a token among the k likeliest: the steps of `sample` in sampling.py, with its bits. */
#ifndef GPT_CLI_SAMPLING_H
#define GPT_CLI_SAMPLING_H

#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "elementwise.h"
#include "kernels.h"
#include "products.h"
#include "simd.h"

enum { SPAN = 64 }; /* columns whose largest logit is computed first */

/* Return the k-th largest of n numbers, 1 <= k <= n, and reorder them (quickselect). */
static float kth_largest(float *x, int64_t n, int64_t k)
{
    int64_t first = 0, last = n - 1, target = k - 1;
    while (first < last) {
        float pivot = x[(first + last) / 2];
        int64_t i = first, j = last;
        while (i <= j) {
            while (x[i] > pivot)
                i++;
            while (x[j] < pivot)
                j--;
            if (i <= j) {
                float kept = x[i];
                x[i++] = x[j];
                x[j--] = kept;
            }
        }
        if (target <= j)
            last = j;
        else if (target >= i)
            first = i;
        else
            break;
    }
    return x[target];
}

/* Write the logits of a row that are at least `bound`, with their columns, and return their number. */
static int64_t gather(
    const float *logits, int64_t n, const float *largest, float bound, float *kept, int32_t *columns)
{
    int64_t count = 0;
    for (int64_t span = 0; span * SPAN < n; span++) {
        if (largest[span] < bound)
            continue;
        for (int64_t i = span * SPAN; i < smaller(n, (span + 1) * SPAN); i++)
            if (logits[i] >= bound) {
                kept[count] = logits[i];
                columns[count++] = i;
            }
    }
    return count;
}

/* Write the k largest logits of a row, and all that equal the last of them, in the order of their
 * columns. Return their number. Those of tokens that may not be chosen, -inf, are left out: after a
 * mask they may be all but a few, and would be sorted. `work` has room for n floats. */
static int64_t likeliest(
    const float *logits, int64_t n, int64_t k, float *kept, int32_t *columns, float *work)
{
    int64_t spans = ceil_div(n, SPAN), count = 0;
    float *largest = work, *ordered = work + spans, bound = -FLT_MAX;
    for (int64_t span = 0; span < spans; span++) {
        int64_t start = span * SPAN;
        largest[span] = largest_of(logits + start, smaller(n - start, SPAN));
    }
    if (k <= spans) { /* the k-th largest of the spans' largest is at most that of the row */
        memcpy(ordered, largest, spans * sizeof *ordered);
        bound = fmaxf(bound, kth_largest(ordered, spans, k));
    }
    count = gather(logits, n, largest, bound, kept, columns);
    if (!count) { /* damaged weights: no logit of the row is a number */
        kept[0] = 0;
        columns[0] = 0;
        return 1;
    }
    memcpy(work, kept, count * sizeof *work);
    bound = kth_largest(work, count, smaller(k, count));
    int64_t left = 0;
    for (int64_t i = 0; i < count; i++)
        if (kept[i] >= bound) {
            kept[left] = kept[i];
            columns[left++] = columns[i];
        }
    return left;
}

static int descending(const void *x, const void *y)
{
    float a = *(const float *)x, b = *(const float *)y;
    return (a < b) - (a > b);
}

/* y = e^x for n numbers. */
static void exp_all(const float *x, int64_t n, float *y)
{
    for (int64_t i = 0; i < n; i += LANES)
        store_some(y + i, exp_vector(load_some(x + i, n - i)), n - i);
}

/* Return the logit of the last of the likeliest tokens whose probabilities add up to p. */
static float nucleus_bound(const float *logits, int64_t n, double p, float *ordered, float *weights)
{
    double total = 0, sum = 0;
    int64_t last = 0;
    memcpy(ordered, logits, n * sizeof *ordered);
    qsort(ordered, n, sizeof *ordered, descending);
    exp_all(ordered, n, weights);
    for (int64_t i = 0; i < n; i++)
        total += weights[i];
    for (sum = weights[0]; last < n - 1 && sum < p * total; sum += weights[last])
        last++;
    return ordered[last];
}

/* Choose the token of one row. */
static void choose(const void *operation, int64_t row, int slot)
{
    const struct choose *job = operation;
    int64_t n = job->n;
    float *kept = job->scratch + slot * 4 * n, *work = kept + n, *weights = work + n;
    int32_t *columns = (int32_t *)(weights + n);
    int64_t count = likeliest(job->logits + row * job->logits_stride, n, job->top_k, kept, columns, work);
    float most = largest_of(kept, count), bound = -INFINITY;
    job->ids[row] = columns[0];
    if (!(most < INFINITY))
        return; /* damaged weights */
    for (int64_t i = 0; i < count; i++)
        kept[i] = (kept[i] - most) / job->temperature;
    if (job->top_p < 1)
        bound = nucleus_bound(kept, count, job->top_p, work, weights);
    if (job->log_min_p > bound)
        bound = job->log_min_p;
    exp_all(kept, count, weights);
    double total = 0, sum = 0;
    int64_t chosen = 0;
    for (int64_t i = 0; i < count; i++)
        total += weights[i] = kept[i] >= bound ? weights[i] : 0;
    for (sum = weights[0]; chosen < count - 1 && sum <= job->uniforms[row] * total;)
        sum += weights[++chosen];
    job->ids[row] = columns[chosen];
}

#endif
