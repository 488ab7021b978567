// The features of a GPU that the kernels use. All other files are plain C++ that calls these functions,
// so a test can replace this file and run the kernels on a CPU.
//
// Compiled with `-fmad=false -ftz=false`: only `multiply_add` fuses a product and a sum, and no tiny
// number becomes 0. Division and square root are rounded as IEEE 754 says.

typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef int int32_t;
typedef unsigned uint32_t;
typedef unsigned short uint16_t;
typedef signed char int8_t;
typedef unsigned char uint8_t;

#define KERNEL extern "C" __global__ void
#define DEVICE __device__ __forceinline__
#define ROUTINE __device__ __noinline__ // large, and seldom called: compiled once
#define CONSTANT __constant__           // for all threads of a launch; the host writes it before
#define UNROLLED _Pragma("unroll")
#define LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)

enum { WARP = 32 };

// Shared memory of the block: its size is an argument of the launch.
extern __shared__ __align__(128) char shared_memory[];

// --- numbers -------------------------------------------------------------------------------------

// x * y + z, rounded once.
DEVICE float multiply_add(float x, float y, float z) { return __fmaf_rn(x, y, z); }

DEVICE int32_t bits_of(float x) { return __float_as_int(x); }
DEVICE float float_of(int32_t bits) { return __int_as_float(bits); }
DEVICE int64_t bits_of(double x) { return __double_as_longlong(x); }
DEVICE double double_of(int64_t bits) { return __longlong_as_double(bits); }

// float16 needs no header of the toolkit: each conversion is one instruction.
DEVICE float widen_float16(uint16_t x)
{
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

DEVICE uint16_t narrow_float16(float x)
{
    uint16_t y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

// bfloat16 is the upper half of a float.
DEVICE float widen_bfloat16(uint16_t x) { return float_of((int32_t)((uint32_t)x << 16)); }

// sum + the dot product of four int8 of x and four of y.
DEVICE int32_t dot4(int32_t x, int32_t y, int32_t sum) { return __dp4a(x, y, sum); }

// --- memory --------------------------------------------------------------------------------------

// Read what another block has written in this launch: the first-level cache may hold an old copy.
DEVICE float load_fresh(const float *from) { return __ldcg(from); }
DEVICE float4 load_fresh(const float4 *from) { return __ldcg(from); }
DEVICE uint16_t load_fresh(const uint16_t *from) { return __ldcg(from); }
DEVICE int64_t load_fresh(const int64_t *from) { return __ldcg(from); }

#if __CUDA_ARCH__ >= 800

// Copy 16 bytes from global to shared memory without waiting.
DEVICE void copy16(void *to, const void *from)
{
    uint32_t address = (uint32_t)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}

// End a group of copies of this thread. Wait until at most `groups` of its groups are not done.
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int groups> DEVICE void wait_for_copies()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}

#else // the processors of 2018 copy at once

DEVICE void copy16(void *to, const void *from) { *(float4 *)to = *(const float4 *)from; }
DEVICE void commit_copies() {}
template <int groups> DEVICE void wait_for_copies() {}

#endif

// --- threads -------------------------------------------------------------------------------------

DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }

// Wait for `threads` threads of the block, a multiple of WARP, at its barrier `number`, from 1 to 15.
DEVICE void sync_threads(int number, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Exchange values with the lane whose number differs in the bits of `lanes`, or read those of a lane.
template <class T> DEVICE T exchange(T x, int lanes) { return __shfl_xor_sync(0xffffffff, x, lanes); }
template <class T> DEVICE T from_lane(T x, int lane) { return __shfl_sync(0xffffffff, x, lane); }

// One bit per lane.
DEVICE uint32_t vote(bool is_so) { return __ballot_sync(0xffffffff, is_so); }
DEVICE int count_bits(uint32_t bits) { return __popc(bits); }

// The number of the lowest bit that is set, from 1 on; 0 if there is none.
DEVICE int first_bit(uint32_t bits) { return __ffs(bits); }

// The sum of an integer over the lanes of a warp, to all of them.
DEVICE int warp_sum(int x)
{
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(0xffffffff, x);
#else
    for (int lanes = WARP / 2; lanes; lanes /= 2)
        x += exchange(x, lanes);
    return x;
#endif
}

// --- barriers between blocks ---------------------------------------------------------------------

// Add to a counter, after all writes of this thread that other blocks are to see.
DEVICE void add_released(uint32_t *counter, uint32_t number)
{
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(number) : "memory");
}

// Read a counter; what its writers wrote before is visible afterwards.
DEVICE uint32_t load_acquired(const uint32_t *counter)
{
    uint32_t number;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(number) : "l"(counter) : "memory");
    return number;
}

// --- barriers between the threads that copy and those that compute -------------------------------

#if __CUDA_ARCH__ >= 800

// A barrier in shared memory. Its phase ends when `count` arrivals are complete.
typedef uint64_t phase_barrier;

DEVICE uint32_t shared_address(const void *at) { return (uint32_t)__cvta_generic_to_shared(at); }

DEVICE void init_phases(phase_barrier *barrier, int count)
{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

// Let other threads, and the processor of copies, see barriers that this thread has initialized.
DEVICE void publish_phases()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

DEVICE void arrive(phase_barrier *barrier)
{
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Return whether the phase of this parity, 0 for the first, has ended.
DEVICE bool has_ended(phase_barrier *barrier, uint32_t parity)
{
    uint32_t ended;
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(ended) : "r"(shared_address(barrier)), "r"(parity) : "memory");
    return ended;
}

#endif

#if __CUDA_ARCH__ >= 900

// Copy `bytes`, a multiple of 16, to shared memory by one thread. Its arrival completes with the copy.
DEVICE void copy_range(void *to, const void *from, int bytes, phase_barrier *barrier)
{
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
                 ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}

// The threads of a warp that arrive at the barrier of a copy.
enum { COPYING_LANES = 1 };

#elif __CUDA_ARCH__ >= 800

enum { COPYING_LANES = WARP };

DEVICE void copy_range(void *to, const void *from, int bytes, phase_barrier *barrier)
{
    int lane = threadIdx.x % WARP;
    for (int at = lane * 16; at < bytes; at += WARP * 16)
        copy16((char *)to + at, (const char *)from + at);
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

#endif
