// SPDX-License-Identifier: Apache-2.0
// ptx: dense.ptx compute_75
// ptx: dense_bf16.ptx compute_80 -DRB_BF16
//
// One layer of the perceptron: Y = X·Wᵀ + bias, then ReLU or nothing.
//
//	rb_dense_f32    the reference: the same chain of fused multiply-adds as
//	                the CPU's kernels, and so the same bits
//	rb_dense_half   f16 (or bf16) on the tensor cores, sums in f32
//	rb_pack_half    f32 → f16 or bf16, with zeros up to whole tiles
#include "common.h"
#ifndef RB_HOST
#include <cuda_fp16.h>
#include <mma.h>
#endif
#ifdef RB_BF16
#ifndef RB_HOST
#include <cuda_bf16.h>
#endif
typedef __nv_bfloat16 half_t;
static __device__ half_t to_half(float v) { return __float2bfloat16(v); }
#else
typedef __half half_t;
static __device__ half_t to_half(float v) { return __float2half(v); }
#endif

using namespace nvcuda;

// A thread computes one output of RB_F32_ROWS rows. The weights are
// transposed, [in][out], so that a warp reads them side by side.
#define RB_F32_ROWS 4

extern "C" __global__ void rb_dense_f32(float *y, u64 y_stride, const float *x, u64 x_stride, const float *weights,
                                        const float *bias, u64 rows, u64 in, u64 out, u64 relu) {
  u64 o = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  u64 first = (u64)blockIdx.y * RB_F32_ROWS;
  if (o >= out) return;
  float sum[RB_F32_ROWS];
  const float *row[RB_F32_ROWS];
  for (int r = 0; r < RB_F32_ROWS; r++) {
    sum[r] = bias[o];
    row[r] = x + (first + r < rows ? first + r : first) * x_stride; // the last group may be short: compute twice, store once
  }
#pragma unroll 8
  for (u64 k = 0; k < in; k++) {
    float w = weights[k * out + o];
#pragma unroll
    for (int r = 0; r < RB_F32_ROWS; r++) sum[r] = fmaf(row[r][k], w, sum[r]);
  }
  for (int r = 0; r < RB_F32_ROWS; r++) {
    if (first + r < rows) y[(first + r) * y_stride + o] = relu && !(sum[r] > 0) ? 0 : sum[r];
  }
}

// A block computes 16 outputs of 32 rows. Its eight warps share the sum over
// the inputs: a small batch has few outputs, and reading the weights needs
// many warps.
//
//	          inputs →   warp 0 1 2 … 7 0 1 2 …   each step 16 inputs
//	rows 0–15            [ ][ ][ ]…[ ]            partial sums, added up in
//	rows 16–31           [ ][ ][ ]…[ ]            shared memory in a fixed order
#define RB_TILE 16
#define RB_WARPS 8
#define RB_ROW_TILES 2

extern "C" __global__ void rb_dense_half(void *y, u64 y_stride, const half_t *x, const half_t *weights, const float *bias,
                                         u64 in, u64 relu, u64 last) {
  __shared__ float part[RB_WARPS][RB_ROW_TILES][RB_TILE * RB_TILE];
  u64 o = (u64)blockIdx.x * RB_TILE, first = (u64)blockIdx.y * RB_ROW_TILES * RB_TILE;
  int warp = threadIdx.x / 32;

  wmma::fragment<wmma::accumulator, RB_TILE, RB_TILE, RB_TILE, float> sum[RB_ROW_TILES];
  wmma::fragment<wmma::matrix_a, RB_TILE, RB_TILE, RB_TILE, half_t, wmma::row_major> a;
  wmma::fragment<wmma::matrix_b, RB_TILE, RB_TILE, RB_TILE, half_t, wmma::col_major> b;
  for (int t = 0; t < RB_ROW_TILES; t++) wmma::fill_fragment(sum[t], 0.0f);
#pragma unroll 4
  for (u64 k = (u64)warp * RB_TILE; k < in; k += RB_WARPS * RB_TILE) {
    wmma::load_matrix_sync(b, weights + o * in + k, (u32)in);
#pragma unroll
    for (int t = 0; t < RB_ROW_TILES; t++) {
      wmma::load_matrix_sync(a, x + (first + t * RB_TILE) * in + k, (u32)in);
      wmma::mma_sync(sum[t], a, b, sum[t]);
    }
  }
  for (int t = 0; t < RB_ROW_TILES; t++) wmma::store_matrix_sync(part[warp][t], sum[t], RB_TILE, wmma::mem_row_major);
  __syncthreads();

  int cell = threadIdx.x; // 256 threads, one per cell of a tile
  u64 col = o + cell % RB_TILE;
  for (int t = 0; t < RB_ROW_TILES; t++) {
    float v = bias[col];
    for (int w = 0; w < RB_WARPS; w++) v += part[w][t][cell];
    if (relu && !(v > 0)) v = 0;
    u64 at = (first + t * RB_TILE + cell / RB_TILE) * y_stride + col;
    if (last)
      ((float *)y)[at] = v;
    else
      ((half_t *)y)[at] = to_half(v);
  }
}

// rb_pack_half fills a padded [to_rows][to_cols] matrix; elements that the source does
// not have are zero.
extern "C" __global__ void rb_pack_half(half_t *to, u64 to_rows, u64 to_cols, const float *from, u64 from_stride, u64 rows,
                                        u64 cols) {
  u64 step = (u64)gridDim.x * blockDim.x;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < to_rows * to_cols; i += step) {
    u64 r = i / to_cols, c = i % to_cols;
    to[i] = to_half(r < rows && c < cols ? from[r * from_stride + c] : 0.0f);
  }
}
