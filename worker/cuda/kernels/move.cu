// SPDX-License-Identifier: Apache-2.0
// ptx: move.ptx compute_75
//
// Rows between the ring, which is host memory mapped into the device, and
// contiguous device memory.
//
//	ring plane            slots = {4, 1, 6}        device
//	slot 0 |......|                                row 0 |slot 4|
//	slot 1 |======|  ─────────────────────────►    row 1 |slot 1|
//	  …                                            row 2 |slot 6|
//
// Blocks are few (RB_MOVE_BLOCKS in Go): a read over the bus takes about a
// microsecond, so what counts is bytes in flight, 32 KiB per block here, and
// the multiprocessors stay free for the batch that computes meanwhile.
#include "common.h"

// move copies n bytes with all threads of the block, in words of T, four in
// flight per thread.
template <typename T> static __device__ void move(u8 *to, const u8 *from, u64 n) {
  T *dst = (T *)to;
  const T *src = (const T *)from;
  u64 words = n / sizeof(T), step = blockDim.x, i = threadIdx.x;
  for (; i + 3 * step < words; i += 4 * step) {
    T a = src[i], b = src[i + step], c = src[i + 2 * step], d = src[i + 3 * step];
    dst[i] = a, dst[i + step] = b, dst[i + 2 * step] = c, dst[i + 3 * step] = d;
  }
  for (; i < words; i += step) dst[i] = src[i];
}

// fill_zero clears n bytes with all threads of the block.
static __device__ void fill_zero(u8 *to, u64 n) {
  for (u64 i = threadIdx.x; i < n; i += blockDim.x) to[i] = 0;
}

// move_chunk takes the widest words that both ends and the length allow.
static __device__ void move_chunk(u8 *to, const u8 *from, u64 n) {
  u64 mix = (u64)to | (u64)from | n;
  if (mix % 16 == 0)
    move<uint4>(to, from, n);
  else if (mix % 4 == 0)
    move<u32>(to, from, n);
  else
    move<u8>(to, from, n);
}

// rb_gather reads rows by slot number; rows from `rows` up to `padded` become
// zero.
extern "C" __global__ void rb_gather(u8 *to, u64 to_stride, const u8 *plane, u64 plane_stride, const u32 *slots,
                                     u64 row_bytes, u64 rows, u64 padded) {
  u64 chunks = (row_bytes + RB_CHUNK - 1) / RB_CHUNK;
  for (u64 unit = blockIdx.x; unit < chunks * padded; unit += gridDim.x) {
    u64 row = unit / chunks, at = unit % chunks * RB_CHUNK;
    u64 n = row_bytes - at < RB_CHUNK ? row_bytes - at : RB_CHUNK;
    if (row < rows)
      move_chunk(to + row * to_stride + at, plane + slots[row] * plane_stride + at, n);
    else
      fill_zero(to + row * to_stride + at, n);
  }
}

// rb_gather_packed reads rows of different sizes by slot number, one behind the other: row i
// becomes the items from offsets[i] to offsets[i + 1]. Items up to `padded` become zero.
// No row has more than most_bytes.
extern "C" __global__ void rb_gather_packed(u8 *to, const u8 *plane, u64 plane_stride, const u32 *slots,
                                            const u32 *offsets, u64 item_bytes, u64 rows, u64 most_bytes, u64 padded) {
  u64 chunks = (most_bytes + RB_CHUNK - 1) / RB_CHUNK, used = offsets[rows] * item_bytes;
  u64 rest = (padded * item_bytes - used + RB_CHUNK - 1) / RB_CHUNK;
  for (u64 unit = blockIdx.x; unit < chunks * rows + rest; unit += gridDim.x) {
    u64 row = unit < chunks * rows ? unit / chunks : rows, at = (unit - row * chunks) * RB_CHUNK;
    u64 begin = offsets[row] * item_bytes, end = row < rows ? offsets[row + 1] * item_bytes : padded * item_bytes;
    if (begin + at >= end) continue;
    u64 n = end - begin - at < RB_CHUNK ? end - begin - at : RB_CHUNK;
    if (row < rows)
      move_chunk(to + begin + at, plane + slots[row] * plane_stride + at, n);
    else
      fill_zero(to + begin + at, n);
  }
}

// rb_scatter writes rows back to their slots.
extern "C" __global__ void rb_scatter(u8 *plane, u64 plane_stride, const u8 *from, u64 from_stride, const u32 *slots,
                                      u64 row_bytes, u64 rows) {
  u64 chunks = (row_bytes + RB_CHUNK - 1) / RB_CHUNK;
  for (u64 unit = blockIdx.x; unit < chunks * rows; unit += gridDim.x) {
    u64 row = unit / chunks, at = unit % chunks * RB_CHUNK;
    u64 n = row_bytes - at < RB_CHUNK ? row_bytes - at : RB_CHUNK;
    move_chunk(plane + slots[row] * plane_stride + at, from + row * from_stride + at, n);
  }
}
