/* Vector types of one processor level, and the operations that C has no operator for.
 *
 * kernels.c is compiled once per level, with flags that define the macros tested below. Arithmetic is
 * IEEE 754 with `-ffp-contract=off`: only `multiply_add` fuses a product and a sum. Lanes therefore
 * compute the same bits on every processor.
 */
#ifndef GPT_CLI_SIMD_H
#define GPT_CLI_SIMD_H

#include <string.h>

#include "kernels.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#elif defined(__AVX2__)
#include <immintrin.h>
#define LANES 8
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#define LANES 4
#else
#error "no vector types for this processor"
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));     /* LANES floats */
typedef int32_t vi __attribute__((vector_size(4 * LANES)));   /* LANES integers */
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef int8_t vb __attribute__((vector_size(4 * LANES)));    /* LANES times four bytes */
typedef int8_t vq __attribute__((vector_size(LANES)));        /* LANES bytes */
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));  /* the bits of LANES short floats */
typedef int16_t vs __attribute__((vector_size(4 * LANES)));   /* LANES pairs of short integers */
typedef int16_t vn __attribute__((vector_size(2 * LANES)));   /* LANES short integers */
typedef uint64_t vl __attribute__((vector_size(2 * LANES)));  /* LANES / 4 times four of these */
typedef uint16_t vus __attribute__((vector_size(4 * LANES)));

#define UNROLLED _Pragma("GCC unroll 16")

/* Load and store vectors at any address, aligned or not. */
INLINE vf load(const float *from) { vf x; memcpy(&x, from, sizeof x); return x; }
INLINE vb load_bytes(const int8_t *from) { vb x; memcpy(&x, from, sizeof x); return x; }
INLINE vh load_short(const uint16_t *from) { vh x; memcpy(&x, from, sizeof x); return x; }
INLINE void store(float *to, vf x) { memcpy(to, &x, sizeof x); }
INLINE void store_short(uint16_t *to, vh x) { memcpy(to, &x, sizeof x); }

/* Return a vector of LANES equal floats, or of LANES times the same four bytes. */
INLINE vf broadcast(float x) { return x - (vf){0}; }
INLINE vb broadcast_four(const int8_t *four)
{
    int32_t bytes;
    memcpy(&bytes, four, sizeof bytes);
    return (vb)(bytes - (vi){0});
}

/* Return x in the lanes where `mask` is all ones, and y where it is 0. */
INLINE vf blend(vi mask, vf x, vf y) { return (vf)((mask & (vi)x) | (~mask & (vi)y)); }

INLINE vf to_float(vi x) { return __builtin_convertvector(x, vf); }

/* bfloat16 is the upper half of a float: widening is exact. */
INLINE vf widen_bfloat16(vh x) { return (vf)(__builtin_convertvector(x, vu) << 16); }

/* The functions below differ between processors:
 *   multiply_add(x, y, z): x * y + z, rounded once.
 *   widen_float16(x): exact. narrow_float16(x): rounded to nearest, ties to even.
 * and those for products with int8 weights, at the end of this file.
 */
#if LANES == 16

INLINE vf multiply_add(vf x, vf y, vf z) { return (vf)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z); }
INLINE vf widen_float16(vh x) { return (vf)_mm512_cvtph_ps((__m256i)x); }
INLINE vh narrow_float16(vf x)
{
    return (vh)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

#elif LANES == 8

INLINE vf multiply_add(vf x, vf y, vf z) { return (vf)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z); }
INLINE vf widen_float16(vh x) { return (vf)_mm256_cvtph_ps((__m128i)x); }
INLINE vh narrow_float16(vf x) { return (vh)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT); }

#else

INLINE vf multiply_add(vf x, vf y, vf z)
{
    return (vf)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y);
}
INLINE vf widen_float16(vh x) { return (vf)vcvt_f32_f16((float16x4_t)x); }
INLINE vh narrow_float16(vf x) { return (vh)vcvt_f16_f32((float32x4_t)x); }

#endif

/* --- products of int8 weights -------------------------------------------------------------------
 *
 * A lane has four weights of a column. Levels with HAS_DOT4 have an instruction for
 *   dot4(sums, weights, x): add to LANES sums the dot products of four int8 weights (-127 to
 *     127) with four int8 of x (-128 to 127), plus BIAS times the sum of the four x.
 * The others multiply short integers. Two vectors hold the weights, and a pair of them is adjacent:
 *
 *     weights            | r0 r1 r2 r3 | of the next column ...
 *     even_weights       |  r0    r2   |
 *     odd_weights        |  r1    r3   |
 *
 *   add_pairs(sums, weights, x): add the products of the pairs, which `sum_of_pairs` returns.
 */
#if defined(__AVX512VNNI__)

#define HAS_DOT4 1
/* vpdpbusd needs one unsigned factor: the weights plus 128. */
#define BIAS 128
INLINE vi dot4(vi sums, vb weights, vb x)
{
    return (vi)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)(weights ^ (int8_t)-128), (__m512i)x);
}

#elif defined(__AVXVNNI__)

#define HAS_DOT4 1
#define BIAS 128
INLINE vi dot4(vi sums, vb weights, vb x)
{
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)(weights ^ (int8_t)-128), (__m256i)x);
}

#elif defined(__ARM_FEATURE_DOTPROD)

#define HAS_DOT4 1
#define BIAS 0
INLINE vi dot4(vi sums, vb weights, vb x)
{
    return (vi)vdotq_s32((int32x4_t)sums, (int8x16_t)weights, (int8x16_t)x);
}

#else

#define HAS_DOT4 0
INLINE vs even_weights(vb weights) { return (vs)((vus)weights << 8) >> 8; }
INLINE vs odd_weights(vb weights) { return (vs)weights >> 8; }
INLINE vs broadcast_pair(const int16_t *pair)
{
    int32_t both;
    memcpy(&both, pair, sizeof both);
    return (vs)(both - (vi){0});
}

#if LANES == 16

typedef vi pair_sums;
INLINE pair_sums add_pairs(pair_sums sums, vs weights, vs x)
{
    return sums + (vi)_mm512_madd_epi16((__m512i)weights, (__m512i)x);
}
INLINE vi sum_of_pairs(pair_sums sums) { return sums; }

#elif LANES == 8

typedef vi pair_sums;
INLINE pair_sums add_pairs(pair_sums sums, vs weights, vs x)
{
    return sums + (vi)_mm256_madd_epi16((__m256i)weights, (__m256i)x);
}
INLINE vi sum_of_pairs(pair_sums sums) { return sums; }

#else

/* smlal does not add the two products of a pair. */
typedef struct { int32x4_t half, other_half; } pair_sums; /* of the columns */
INLINE pair_sums add_pairs(pair_sums sums, vs weights, vs x)
{
    int16x8_t w = (int16x8_t)weights, y = (int16x8_t)x;
    return (pair_sums){
        vmlal_s16(sums.half, vget_low_s16(w), vget_low_s16(y)),
        vmlal_high_s16(sums.other_half, w, y),
    };
}
INLINE vi sum_of_pairs(pair_sums sums) { return (vi)vpaddq_s32(sums.half, sums.other_half); }

#endif

#endif

#endif
