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
