// The kernels of `cupy_ops`: all computation except the matrix products.
//
// `number` is the type of weights and activations, float or half. Sums and the residual stream x
// are float. Shapes are those of model.py: B batch, T new tokens, S = past + T, H heads, D head
// size, C = H * D. Arrays are row-major.

#ifdef HALF
#include <cuda_fp16.h>
typedef __half number;
__device__ float wide(number x) { return __half2float(x); }
__device__ number narrow(float x) { return __float2half(x); }
#else
typedef float number;
__device__ float wide(number x) { return x; }
__device__ number narrow(float x) { return x; }
#endif

#define WARP 32
#define LOWEST -3.4028235e38f

__device__ float sum_of_warp(float x)
{
    for (int distance = WARP / 2; distance; distance /= 2)
        x += __shfl_xor_sync(0xffffffff, x, distance);
    return x;
}

__device__ float largest_of_warp(float x)
{
    for (int distance = WARP / 2; distance; distance /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, distance));
    return x;
}

// The sum or the maximum over the threads of a block, returned to every thread.

__device__ float sum_of_block(float x)
{
    __shared__ float sums[WARP];
    x = sum_of_warp(x);
    __syncthreads();  // all threads have read the sums of the previous call
    if (threadIdx.x % WARP == 0)
        sums[threadIdx.x / WARP] = x;
    __syncthreads();
    float sum = 0;
    for (int warp = 0; warp < blockDim.x / WARP; warp++)
        sum += sums[warp];
    return sum;
}

__device__ float largest_of_block(float x)
{
    __shared__ float maxima[WARP];
    x = largest_of_warp(x);
    __syncthreads();
    if (threadIdx.x % WARP == 0)
        maxima[threadIdx.x / WARP] = x;
    __syncthreads();
    float largest = maxima[0];
    for (int warp = 1; warp < blockDim.x / WARP; warp++)
        largest = fmaxf(largest, maxima[warp]);
    return largest;
}

// x (tokens, C) = rows of wte (V, C) + rows of wpe (context, C). A block computes a token. An id or
// position out of range gives NaN, which is reported as damaged weights.
extern "C" __global__ void embed(
    const number* wte, const float* wpe, const long long* ids, const long long* positions,
    long long vocabulary, long long context, int C, float* x)
{
    long long token = blockIdx.x, id = ids[token], position = positions[token];
    bool valid = id >= 0 && id < vocabulary && position >= 0 && position < context;
    for (int c = threadIdx.x; c < C; c += blockDim.x)
        x[token * C + c] = valid ? wide(wte[id * C + c]) + wpe[position * C + c] : nanf("");
}

// y (rows, C) = (x - mean) / sqrt(variance + epsilon) * weight + bias. A block computes
// a row.
extern "C" __global__ void layer_norm(
    const float* x, const float* weight, const float* bias, float epsilon, int C, number* y)
{
    x += (long long)blockIdx.x * C;
    y += (long long)blockIdx.x * C;
    float sum = 0, squares = 0;
    for (int c = threadIdx.x; c < C; c += blockDim.x)
        sum += x[c];
    float mean = sum_of_block(sum) / C;
    for (int c = threadIdx.x; c < C; c += blockDim.x)
        squares += (x[c] - mean) * (x[c] - mean);
    float scale = rsqrtf(sum_of_block(squares) / C + epsilon);
    for (int c = threadIdx.x; c < C; c += blockDim.x)
        y[c] = narrow((x[c] - mean) * scale * weight[c] + bias[c]);
}

__device__ float activate(float x, int activation)  // in the order of `cupy_ops`
{
    switch (activation) {
    case 1: return 0.5f * x * (1 + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
    case 2: return 0.5f * x * (1 + erff(0.7071067812f * x));
    case 3: return fmaxf(x, 0.0f);
    case 4: return 0.5f * x * (1 + tanhf(0.5f * x));
    case 5: return tanhf(x);
    default: return x;
    }
}

// y = activation(y + bias), for y (rows, width) of `count` elements.
extern "C" __global__ void finish(
    number* y, const float* bias, int activation, int width, long long count)
{
    long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step)
        y[i] = narrow(activate(wide(y[i]) + bias[i % width], activation));
}

// Append k and v (B, H, T, D) to the `past` (B) tokens in the rows of keys and values
// (B, H, capacity, D): of the T new tokens of a row, only the first `lengths` (B). k and v have the
// same strides, in elements. A block copies a token.
extern "C" __global__ void store(
    const number* k, const number* v, long long row, long long head, long long token,
    const long long* past, const long long* lengths, int H, int T, int D, long long capacity,
    number* keys, number* values)
{
    long long b = blockIdx.x / T, t = blockIdx.x % T;
    if (t >= lengths[b])
        return;
    for (int c = threadIdx.x; c < H * D; c += blockDim.x) {
        long long h = c / D, d = c % D;
        long long from = b * row + h * head + t * token + d;
        long long to = ((b * H + h) * capacity + past[b] + t) * D + d;
        keys[to] = k[from];
        values[to] = v[from];
    }
}

// weights (B, H, T, S) = softmax of scale * scores over the first `visible` (B, T) keys of a
// query, and 0 for the other keys. A block computes a query of a head.
extern "C" __global__ void softmax(
    const float* scores, const long long* visible, float scale, int H, int T, int S,
    number* weights)
{
    long long row = blockIdx.x, b = row / ((long long)H * T), t = row % T;
    scores += row * S;
    weights += row * S;
    int seen = visible[b * T + t];
    float largest = LOWEST, sum = 0;
    for (int s = threadIdx.x; s < seen; s += blockDim.x)
        largest = fmaxf(largest, scale * scores[s]);
    largest = largest_of_block(largest);
    for (int s = threadIdx.x; s < seen; s += blockDim.x)
        sum += expf(scale * scores[s] - largest);
    float inverse_sum = 1 / sum_of_block(sum);
    for (int s = threadIdx.x; s < S; s += blockDim.x)
        weights[s] = narrow(s < seen ? inverse_sum * expf(scale * scores[s] - largest) : 0);
}

// y (B, H, D): the attention of one query per row, q (B, H, D), over the first `visible` (B) of
// keys and values (B, H, capacity, D). A block computes a head. The strides of q count elements.
// Shared memory: `visible` floats for the weights, and max(threads, D) floats for the partial sums.
extern "C" __global__ void attend_one(
    const number* q, long long q_row, long long q_head,
    const number* keys, const number* values, long long capacity,
    const long long* visible, float scale, int H, int D, number* y)
{
    extern __shared__ float weights[];
    int b = blockIdx.x / H, h = blockIdx.x % H, thread = threadIdx.x, threads = blockDim.x;
    int seen = visible[b];
    float* parts = weights + seen;
    q += b * q_row + h * q_head;
    keys += blockIdx.x * capacity * D;
    values += blockIdx.x * capacity * D;

    for (int s = thread / WARP; s < seen; s += threads / WARP) {  // a warp per key
        float score = 0;
        for (int d = thread % WARP; d < D; d += WARP)
            score += wide(q[d]) * wide(keys[(long long)s * D + d]);
        score = sum_of_warp(score);
        if (thread % WARP == 0)
            weights[s] = scale * score;
    }
    __syncthreads();
    float largest = LOWEST, sum = 0;
    for (int s = thread; s < seen; s += threads)
        largest = fmaxf(largest, weights[s]);
    largest = largest_of_block(largest);
    for (int s = thread; s < seen; s += threads) {
        weights[s] = expf(weights[s] - largest);
        sum += weights[s];
    }
    float inverse_sum = 1 / sum_of_block(sum);  // a barrier, too: all threads see all weights

    int groups = D < threads ? threads / D : 1;  // of threads, which take subsets of the keys
    for (int index = thread; index < groups * D; index += threads) {
        float part = 0;
        for (int s = index / D; s < seen; s += groups)
            part += weights[s] * wide(values[(long long)s * D + index % D]);
        parts[index] = part;
    }
    __syncthreads();
    for (int d = thread; d < D; d += threads) {
        float mixed = 0;
        for (int group = 0; group < groups; group++)
            mixed += parts[group * D + d];
        y[(long long)blockIdx.x * D + d] = narrow(inverse_sum * mixed);
    }
}
