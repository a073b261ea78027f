/* SPDX-License-Identifier: Apache-2.0 */
// Enough of CUDA to run the kernels on the CPU, for tests: a thread of the
// device is a thread of the host, __syncthreads a barrier among those of a
// block, and blocks run one after the other. Slow, and exact about what each
// thread computes.
#pragma once
#include <barrier>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __global__
#define __shared__ static // one block at a time: its threads share it

struct host_dim { unsigned x = 1, y = 1, z = 1; };
struct uint4 { uint32_t x, y, z, w; };

inline thread_local host_dim threadIdx, blockIdx;
inline host_dim blockDim, gridDim;
inline std::barrier<> *host_block; // of the launch that runs

inline void __syncthreads() { host_block->arrive_and_wait(); }

inline float __fadd_rn(float a, float b) { volatile float v = a + b; return v; }
inline float __fmul_rn(float a, float b) { volatile float v = a * b; return v; }
inline double __dadd_rn(double a, double b) { volatile double v = a + b; return v; }
inline double __dmul_rn(double a, double b) { volatile double v = a * b; return v; }

typedef _Float16 __half;
inline __half __float2half(float v) { return (__half)v; }

// bf16 is the upper half of an f32, rounded to nearest, ties to even.
struct __nv_bfloat16 {
  uint16_t bits;
  operator float() const { return std::bit_cast<float>((uint32_t)bits << 16); }
};
inline __nv_bfloat16 __float2bfloat16(float v) {
  uint32_t u = std::bit_cast<uint32_t>(v);
  if (v != v) return {(uint16_t)(u >> 16 | 0x40)};
  return {(uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}

// The tensor cores' 16×16×16 product. A warp computes it together; here the
// warp's first thread does, the others only pass through.
namespace nvcuda::wmma {
struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major };

template <typename Use, int M, int N, int K, typename T, typename Layout = void> struct fragment { float v[M * N]; };

inline bool first_lane() { return threadIdx.x % 32 == 0; }

template <typename F> void fill_fragment(F &f, float v) {
  if (first_lane()) for (float &e : f.v) e = v;
}

// a[row][k] from row-major memory; b[k][col] from column-major memory, kept
// as [col][k]: both are rows of 16 that lie ld apart.
template <typename F, typename T> void load_matrix_sync(F &f, const T *p, unsigned ld) {
  if (first_lane()) for (int r = 0; r < 16; r++) for (int c = 0; c < 16; c++) f.v[r * 16 + c] = (float)p[r * ld + c];
}

template <typename D, typename A, typename B> void mma_sync(D &d, const A &a, const B &b, const D &c) {
  if (!first_lane()) return;
  for (int r = 0; r < 16; r++) for (int o = 0; o < 16; o++) {
    float sum = c.v[r * 16 + o];
    for (int k = 0; k < 16; k++) sum += a.v[r * 16 + k] * b.v[o * 16 + k];
    d.v[r * 16 + o] = sum;
  }
}

template <typename F> void store_matrix_sync(float *p, const F &f, unsigned ld, layout_t) {
  if (first_lane()) for (int r = 0; r < 16; r++) for (int c = 0; c < 16; c++) p[r * ld + c] = f.v[r * 16 + c];
}
} // namespace nvcuda::wmma
