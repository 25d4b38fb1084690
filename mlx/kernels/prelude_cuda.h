// The words of the kernel texts in CUDA. A simdgroup is a warp, a threadgroup is a block.

#include <cuda_fp16.h>

#define TM_INLINE __device__ __forceinline__
#define TM_UNROLL _Pragma("unroll")
#define TM_LOOP _Pragma("unroll 1")
#define TM_OUT(T) T*
#define TM_SHARED(T, name, count) __shared__ T name[count]
#define TM_BARRIER() __syncthreads()
// MLX passes every input as a pointer.
#define TM_SCALAR(name) (name[0])

#define TM_INF __int_as_float(0x7f800000)
#define TM_NAN __int_as_float(0x7fffffff)

#define tm_exp(x) __expf(x)
#define tm_exp2(x) exp2f(x)
#define tm_log2(x) log2f(x)
#define tm_sqrt(x) sqrtf(x)
#define tm_tanh(x) tanhf(x)
#define tm_rint(x) rintf(x)
#define tm_floor(x) floorf(x)
// The greater of two, or the one that is a number.
#define tm_greater(a, b) fmaxf(a, b)
#define tm_least(a, b) min(a, b)

typedef unsigned int uint;
typedef long long tm_index;
typedef __half tm_half;

// Two words, least first, shifted right by less than 32 bits.
#define tm_funnel(low, high, shift) __funnelshift_r(low, high, shift)

#define tm_bits_of(x) __float_as_uint(x)
#define tm_float_of(bits) __uint_as_float(bits)
#define tm_half_bits(h) uint(__half_as_ushort(h))
#define tm_half_of(bits) __ushort_as_half((unsigned short)(bits))

// The names under which Metal declares thread indices.
#define thread_position_in_threadgroup threadIdx
#define threadgroup_position_in_grid blockIdx
#define threadgroups_per_grid gridDim
#define thread_index_in_threadgroup (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z))
#define thread_index_in_simdgroup (thread_index_in_threadgroup & 31u)
#define simdgroup_index_in_threadgroup (thread_index_in_threadgroup >> 5)

#define tm_shuffle_xor(x, mask) __shfl_xor_sync(0xffffffffu, x, mask)
// The `x` of one lane.
#define tm_shuffle(x, from) __shfl_sync(0xffffffffu, x, from)
#define tm_ballot(x, lane) __ballot_sync(0xffffffffu, x)

TM_INLINE float tm_sum(float x) {
  TM_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) x += tm_shuffle_xor(x, mask);
  return x;
}

TM_INLINE float tm_max(float x) {
  TM_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) x = fmaxf(x, tm_shuffle_xor(x, mask));
  return x;
}

TM_INLINE uint tm_min(uint x) {
  TM_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) x = min(x, tm_shuffle_xor(x, mask));
  return x;
}
