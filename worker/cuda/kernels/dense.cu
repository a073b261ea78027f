// SPDX-License-Identifier: Apache-2.0
// ptx: dense.ptx compute_75
//
// One layer of the perceptron: Y = X·Wᵀ + bias, then ReLU or nothing. It is the same chain of
// fused multiply-adds as in the CPU's kernels, and so gives the same bits.
#include "common.h"

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
