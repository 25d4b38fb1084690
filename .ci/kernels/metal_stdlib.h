// What the kernel texts use of Metal's standard library, declared in C++ for OpenCL, whose address spaces are those of Metal.
// Nothing here is defined: the texts are read and instantiated, not run.
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned char uint8_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef half float16_t;
typedef uint uint3 __attribute__((ext_vector_type(3)));

struct bfloat16_t {
  ushort bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float);
  operator float() const;
  operator float() const __global;
  operator float() const __constant;
};

#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))

template <typename T, typename U>
T as_type(U from) {
  static_assert(sizeof(T) == sizeof(U), "as_type keeps the size");
  return __builtin_bit_cast(T, from);
}

namespace metal {
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
namespace fast {
float exp(float);
}
float exp2(float);
float log2(float);
float sqrt(float);
float tanh(float);
float rint(float);
float floor(float);
float fmax(float, float);
uint min(uint, uint);
int min(int, int);
float simd_sum(float);
float simd_max(float);
uint simd_min(uint);
uint simd_or(uint);
float simd_shuffle(float, ushort);
float simd_shuffle_xor(float, ushort);
}

void threadgroup_barrier(metal::mem_flags);

// Arrays of a threadgroup are declared in kernels only, and C++ for OpenCL has no kernel that is a template: a pointer stands for one.
template <typename T, int N>
threadgroup T* tm_array() {
  static_assert(N > 0, "an array of a threadgroup has entries");
  return 0;
}
