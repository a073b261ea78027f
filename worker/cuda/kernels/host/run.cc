// SPDX-License-Identifier: Apache-2.0
// Runs kernels on the CPU as told on standard input, for vectors_test.go:
//
//	name, NUL · u64 gridX, gridY, block, arguments
//	per argument: u64 length and so many bytes of a buffer, or u64 ~0 and a u64 value
//
// and writes all buffers back in the same order.
#define RB_HOST
#include "../common.h"

#include "../affine.cu"
#include "../dense.cu"
#include "../move.cu"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <thread>
#include <vector>

typedef void (*kernel)(u64, u64, u64, u64, u64, u64, u64, u64, u64, u64);

#define KERNEL(name) {#name, (void *)name}
static const std::map<std::string, void *> kernels = {
    KERNEL(rb_gather),     KERNEL(rb_scatter),    KERNEL(rb_affine_f32), KERNEL(rb_affine_f64),
    KERNEL(rb_affine_i32), KERNEL(rb_affine_i64), KERNEL(rb_dense_f32),  KERNEL(rb_gather_packed),
};

static void take(void *p, size_t n) {
  if (n > 0 && fread(p, 1, n, stdin) != n) exit(3);
}

static u64 take64() {
  u64 v;
  take(&v, 8);
  return v;
}

static void launch(kernel f, unsigned grid_x, unsigned grid_y, unsigned block, u64 *a) {
  std::barrier<> barrier(block);
  host_block = &barrier;
  blockDim.x = block, gridDim.x = grid_x, gridDim.y = grid_y;
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < block; t++)
    threads.emplace_back([=] {
      threadIdx.x = t;
      for (blockIdx.y = 0; blockIdx.y < grid_y; blockIdx.y++)
        for (blockIdx.x = 0; blockIdx.x < grid_x; blockIdx.x++) {
          f(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9]);
          host_block->arrive_and_wait(); // the next block uses the same shared memory
        }
    });
  for (auto &t : threads) t.join();
}

int main() {
  std::string name;
  for (int c; (c = getchar()) > 0;) name += (char)c;
  auto found = kernels.find(name);
  if (found == kernels.end()) return 2;
  u64 grid_x = take64(), grid_y = take64(), block = take64(), count = take64(), args[10] = {};
  std::vector<std::pair<void *, size_t>> buffers;
  for (u64 i = 0; i < count && i < 10; i++) {
    u64 n = take64();
    if (n == ~0ull) {
      args[i] = take64();
      continue;
    }
    void *p = aligned_alloc(256, (n + 511) / 256 * 256);
    take(p, n);
    args[i] = (u64)p;
    buffers.push_back({p, n});
  }
  launch((kernel)found->second, (unsigned)grid_x, (unsigned)grid_y, (unsigned)block, args);
  for (auto &[p, n] : buffers) fwrite(p, 1, n, stdout);
  return 0;
}
