/* SPDX-License-Identifier: Apache-2.0 */
// What all kernels share. A kernel takes only 8-byte parameters: pointers and
// u64. So a launch is a list of 64-bit words, in Go as in the host tests.
#pragma once

#ifdef RB_HOST
#include "host/cuda_on_host.h"
#endif

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// A unit of work when rows are moved: this much of one row, by one block.
#define RB_CHUNK 16384
