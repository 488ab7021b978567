// Replaces ops/cuda/device.cu, so that kernels run on a CPU. It includes no header of C or C++, as a
// kernel has none, and `__CUDA_ARCH__` is a flag of the compiler.

#include "threads.h"

typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef int int32_t;
typedef unsigned uint32_t;
typedef unsigned short uint16_t;
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef __SIZE_TYPE__ size_t;

// KERNEL, CONSTANT and LAUNCH_BOUNDS are flags of the compiler.
#define DEVICE inline
#define ROUTINE [[gnu::noinline]] inline
#define UNROLLED
#define INFINITY __builtin_inff()
#define NAN float_of(0x7fffffff)

#define threadIdx emulated::self->thread
#define blockIdx emulated::self->block
#define blockDim emulated::block_size
#define gridDim emulated::grid_size
#define shared_memory emulated::self->shared

enum { WARP = 32 };

#define VECTOR2(name, type)                                     \
    struct alignas(2 * sizeof(type)) name##2 { type x, y; };    \
    DEVICE name##2 make_##name##2(type x, type y) { return {x, y}; }
#define VECTOR4(name, type)                                     \
    struct alignas(4 * sizeof(type) < 16 ? 4 * sizeof(type) : 16) name##4 { type x, y, z, w; }; \
    DEVICE name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
VECTOR2(float, float) VECTOR4(float, float)
VECTOR2(int, int) VECTOR4(int, int)
VECTOR2(uint, uint32_t) VECTOR4(uint, uint32_t)
VECTOR2(double, double) VECTOR2(longlong, long long)
VECTOR2(char, signed char) VECTOR4(char, signed char)
VECTOR2(short, short) VECTOR4(short, short)
VECTOR2(ushort, uint16_t) VECTOR4(ushort, uint16_t)

// --- numbers -------------------------------------------------------------------------------------

DEVICE float multiply_add(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
DEVICE float square_root(float x) { return __builtin_sqrtf(x); }
extern "C" float sqrtf(float);

template <class To, class From> DEVICE To same_bits(From x)
{
    To y;
    static_assert(sizeof x == sizeof y, "sizes");
    __builtin_memcpy(&y, &x, sizeof y);
    return y;
}

DEVICE int32_t bits_of(float x) { return same_bits<int32_t>(x); }
DEVICE float float_of(int32_t bits) { return same_bits<float>(bits); }
DEVICE int64_t bits_of(double x) { return same_bits<int64_t>(x); }
DEVICE double double_of(int64_t bits) { return same_bits<double>(bits); }

DEVICE float widen_float16(uint16_t x)
{
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, exponent = x >> 10 & 31, fraction = x & 1023;
    if (exponent == 31)
        return fraction ? NAN : float_of(sign | 0x7f800000);
    float size = exponent ? float_of((exponent + 112) << 23 | fraction << 13)
                          : (float)fraction * 0x1p-24f;
    return float_of(bits_of(size) | sign);
}

// Rounds to the nearest, and halves to even.
DEVICE uint16_t narrow_float16(float x)
{
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000)
        return 0x7fff;
    if (size >= 0x477ff000) // 65520
        return sign | 0x7c00;
    if (size < 0x38800000) // 2^-14: the sum is rounded to a multiple of 2^-24
        return sign | (bits_of(float_of(size) + 0.5f) & 0x7fffff);
    return sign | ((size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
}

DEVICE float widen_bfloat16(uint16_t x) { return float_of((int32_t)((uint32_t)x << 16)); }

DEVICE int32_t dot4(int32_t x, int32_t y, int32_t sum)
{
    for (int shift = 0; shift < 32; shift += 8)
        sum = (uint32_t)sum + (uint32_t)((int8_t)(x >> shift) * (int8_t)(y >> shift));
    return sum;
}

// --- memory --------------------------------------------------------------------------------------

DEVICE float load_fresh(const float *from) { return *from; }
DEVICE float4 load_fresh(const float4 *from) { return *from; }
DEVICE uint16_t load_fresh(const uint16_t *from) { return *from; }
DEVICE int64_t load_fresh(const int64_t *from) { return *from; }

#if __CUDA_ARCH__ >= 800

DEVICE void copy16(void *to, const void *from) { emulated::copy16(to, from); }
DEVICE void commit_copies() { emulated::commit_copies(); }
template <int groups> DEVICE void wait_for_copies() { emulated::wait_for_copies(groups); }

#else

DEVICE void copy16(void *to, const void *from) { *(float4 *)to = *(const float4 *)from; }
DEVICE void commit_copies() {}
template <int groups> DEVICE void wait_for_copies() {}

#endif

// --- threads -------------------------------------------------------------------------------------

DEVICE void sync_block() { emulated::wait_at(0, 0); }
DEVICE void sync_warp() { emulated::meet_lanes(0, "sync_warp"); }
DEVICE void sync_threads(int number, int threads) { emulated::wait_at(number, threads); }

template <class T> DEVICE T value_of_lane(T x, int lane, const char *function)
{
    uint64_t brought = 0;
    static_assert(sizeof x <= sizeof brought, "a lane exchanges 8 bytes at most");
    __builtin_memcpy(&brought, &x, sizeof x);
    const unsigned long long *all = emulated::meet_lanes(brought, function);
    __builtin_memcpy(&x, all + lane % WARP, sizeof x);
    return x;
}

template <class T> DEVICE T exchange(T x, int lanes)
{
    return value_of_lane(x, emulated::self->lane ^ lanes, "exchange");
}

template <class T> DEVICE T from_lane(T x, int lane) { return value_of_lane(x, lane, "from_lane"); }

DEVICE uint32_t vote(bool is_so) { return emulated::meet_lanes(is_so, "vote")[WARP]; }
DEVICE int count_bits(uint32_t bits) { return __builtin_popcount(bits); }
DEVICE int warp_sum(int x)
{
    for (int lanes = WARP / 2; lanes; lanes /= 2)
        x += exchange(x, lanes);
    return x;
}
DEVICE int first_bit(uint32_t bits) { return __builtin_ffs((int)bits); }

// --- barriers between blocks ---------------------------------------------------------------------

DEVICE void add_released(uint32_t *counter, uint32_t number)
{
    emulated::add_released(counter, number);
}

DEVICE uint32_t load_acquired(const uint32_t *counter)
{
    return emulated::load_acquired(counter);
}

// --- barriers between the threads that copy and those that compute -------------------------------

#if __CUDA_ARCH__ >= 800

typedef uint64_t phase_barrier;

enum { COPYING_LANES = __CUDA_ARCH__ >= 900 ? 1 : WARP };

DEVICE void init_phases(phase_barrier *barrier, int count) { emulated::init_phases(barrier, count); }
DEVICE void publish_phases() { emulated::publish_phases(); }
DEVICE void arrive(phase_barrier *barrier) { emulated::arrive(barrier); }

DEVICE bool has_ended(phase_barrier *barrier, uint32_t parity)
{
    return emulated::has_ended(barrier, parity);
}

DEVICE void copy_range(void *to, const void *from, int bytes, phase_barrier *barrier)
{
    int lane = COPYING_LANES == 1 ? 0 : emulated::self->lane;
    emulated::copy_range(to, from, bytes, barrier, lane, COPYING_LANES);
}

#endif
