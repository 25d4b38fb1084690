// The words of the kernel texts in Metal. MLX writes the signature around a body and declares the thread indices that it names.

#include <metal_stdlib>

#define TM_INLINE inline
#define TM_UNROLL _Pragma("clang loop unroll(full)")
#define TM_LOOP _Pragma("clang loop unroll(disable)")
// An output as a parameter of a helper.
#define TM_OUT(T) device T*
// An array of the threadgroup; only a kernel may declare one.
#define TM_SHARED(T, name, count) threadgroup T name[count]
#define TM_BARRIER() threadgroup_barrier(metal::mem_flags::mem_threadgroup)
// An input without axes, which MLX passes as a reference.
#define TM_SCALAR(name) (name)

#define TM_INF INFINITY
#define TM_NAN NAN

// MLX compiles custom kernels in safe mode: where speed counts the fast form is named.
#define tm_exp(x) metal::fast::exp(x)
#define tm_exp2(x) metal::exp2(x)
#define tm_log2(x) metal::log2(x)
#define tm_sqrt(x) metal::sqrt(x)
#define tm_tanh(x) metal::tanh(x)
#define tm_rint(x) metal::rint(x)
#define tm_floor(x) metal::floor(x)
// The greater of two, or the one that is a number.
#define tm_greater(a, b) metal::fmax(a, b)
#define tm_least(a, b) metal::min(a, b)

#define tm_sum(x) metal::simd_sum(x)
#define tm_max(x) metal::simd_max(x)
#define tm_min(x) metal::simd_min(x)
#define tm_shuffle_xor(x, mask) metal::simd_shuffle_xor(x, ushort(mask))
// The `x` of one lane.
#define tm_shuffle(x, from) metal::simd_shuffle(x, ushort(from))
// Bit i of the result is set where lane i has a true `x`.
#define tm_ballot(x, lane) metal::simd_or(uint(bool(x)) << uint(lane))

typedef long tm_index;
typedef half tm_half;

// Two words, least first, shifted right by less than 32 bits.
#define tm_funnel(low, high, shift) (((low) >> (shift)) | (((high) << 1) << (31u - (shift))))

#define tm_bits_of(x) as_type<uint>(float(x))
#define tm_float_of(bits) as_type<float>(uint(bits))
#define tm_half_bits(h) uint(as_type<ushort>(h))
#define tm_half_of(bits) as_type<half>(ushort(bits))
