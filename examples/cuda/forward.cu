// SPDX-License-Identifier: Apache-2.0
// ptx: forward.ptx compute_75
//
// Your own model as one CUDA kernel: a small classifier's last layer,
//
//	y[row][o] = bias[o] + Σ_k x[row][k] · weights[o][k],   64 inputs, 10 outputs
//
// ringbatch starts one thread per output element of the whole batch and passes,
// in this order: a pointer per input, a pointer per output, the number of rows,
// the shapes, and the bytes of the weights file. What you don't need at the end
// of the list you may leave out.
#define INPUTS 64
#define OUTPUTS 10

extern "C" __global__ void forward(const float *x,         // rows × 64, one row after the other
                                   float *y,               // rows × 10
                                   long long rows,         // how many rows this batch has
                                   const long long *shape, // {64, 10}: the dimensions of a row of x, then of y
                                   const float *weights) { // 10 × 64 weights, then 10 biases
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= rows * OUTPUTS) return; // the last block has threads to spare
  long long row = i / OUTPUTS, o = i % OUTPUTS;

  float sum = weights[OUTPUTS * INPUTS + o];
  for (int k = 0; k < INPUTS; k++) sum += x[row * INPUTS + k] * weights[o * INPUTS + k];
  y[i] = sum;
}
