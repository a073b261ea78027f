// SPDX-License-Identifier: Apache-2.0
// ptx: affine.ptx compute_75
//
// y = scale·x + offset, elementwise, rounded after the product as in Go.
#include "common.h"

#define RB_AFFINE(T, TIMES_PLUS)                                                             \
  extern "C" __global__ void rb_affine_##T(T##_t *y, const T##_t *x, u64 n, u64 a, u64 b) { \
    T##_t scale = *(T##_t *)&a, offset = *(T##_t *)&b;                                       \
    u64 step = (u64)gridDim.x * blockDim.x;                                                  \
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)               \
      y[i] = TIMES_PLUS(scale, x[i], offset);                                                \
  }

typedef float f32_t;
typedef double f64_t;
typedef int i32_t;
typedef long long i64_t;

// The compiler would fuse a plain a*x+b, with other bits in the last place.
static __device__ float times_plus(float a, float x, float b) { return __fadd_rn(__fmul_rn(a, x), b); }
static __device__ double times_plus(double a, double x, double b) { return __dadd_rn(__dmul_rn(a, x), b); }
// Unsigned, where overflow wraps around as in Go.
static __device__ int times_plus(int a, int x, int b) { return (int)((u32)a * (u32)x + (u32)b); }
static __device__ long long times_plus(long long a, long long x, long long b) { return (long long)((u64)a * (u64)x + (u64)b); }

RB_AFFINE(f32, times_plus)
RB_AFFINE(f64, times_plus)
RB_AFFINE(i32, times_plus)
RB_AFFINE(i64, times_plus)
