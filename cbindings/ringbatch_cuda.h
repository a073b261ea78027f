/* SPDX-License-Identifier: Apache-2.0 */
/* ringbatch_cuda.h: the part of ringbatch.h for device memory (docs/gpu.md). Its rules hold here, too. */
#ifndef RINGBATCH_CUDA_H
#define RINGBATCH_CUDA_H

#include "ringbatch.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The device memory of a mapping, which stays mapped as long. Set size =
 * sizeof(rb_device) first: so many bytes are written. ordinal is -1, and base 0, if
 * there is none. */
typedef struct rb_device {
	uint32_t size;
	int32_t ordinal;      /* of the GPU in this process; the model's text may have another number */
	uint64_t base;        /* a CUdeviceptr of this process */
	uint64_t bytes;
	void *context;        /* CUcontext: the GPU's primary context, retained as long */
	char gpu[48];         /* its UUID, as nvidia-smi prints it */
} rb_device;
RB_API int rb_map_device(uint64_t map, rb_device *device);

/* For models with tensors in device memory: commits the requests after the stream's
 * work so far (a CUstream; NULL is the default stream), without waiting for it. For
 * the caller the requests are committed; they expire that long after the stream's arrival.
 * (With rb_commit, the caller's writes must have happened.) If one of them cannot be
 * committed, or the driver refuses, none is. A request that is released earlier is
 * canceled when the stream arrives; until then its slots stay in use. If the stream
 * fails first, rb_wait returns RB_ERR_FAILED. */
RB_API int rb_commit_on_stream(rb_client client, const uint64_t *requests, uint32_t count, void *stream, int64_t expires, uint32_t flags);

/* rb_release after the stream's work so far, which may still read the outputs. For the
 * caller the request is released at once. */
RB_API int rb_release_on_stream(rb_client client, uint64_t request, void *stream);

#ifdef __cplusplus
}
#endif
#endif
