/* SPDX-License-Identifier: Apache-2.0 */
/* ringbatch_weights.h: the part of ringbatch.h for live weights (docs/weights.md). Its rules hold here, too. */
#ifndef RINGBATCH_WEIGHTS_H
#define RINGBATCH_WEIGHTS_H

#include "ringbatch.h"

struct rb_device; /* ringbatch_cuda.h */

#ifdef __cplusplus
extern "C" {
#endif

/* A publisher, one for each model, writes versions of a model's tensors into shared
 * memory; workers follow. Each batch runs with one version. docs/weights.md. */
typedef uint64_t rb_publisher; /* 0 is none */
typedef uint64_t rb_follower;  /* 0 is none */

/* tensors: name:dtype[dims], with blanks between them; all in host memory, or all in the
 * memory of one GPU ("w:f32[4]@device:0"), where followers on that GPU read them.
 * RB_ERR_BUSY if another process publishes the weights of this model; RB_ERR_UNKNOWN_MODEL
 * or RB_ERR_NO_WORKER if no worker follows. With options->wait, the call waits for a broker
 * and a worker. The publisher is the caller's until rb_publish_close. A worker that
 * publishes, a learner, sets run_once: else a batch that fails may be learned twice. */
RB_API int rb_publish_open(const char *model, const char *tensors, const rb_connect_options *options, rb_publisher *publisher);
/* The k-th tensor; its offset counts from the buffer of rb_publish_begin. */
RB_API int rb_publish_tensor(rb_publisher publisher, uint32_t k, rb_tensor *tensor);
/* The device memory of the weights, as of rb_map_device. */
RB_API int rb_publish_device(rb_publisher publisher, struct rb_device *device);
/* A buffer that no worker reads, to write until rb_publish_commit. It has bytes of an older
 * version. In device memory it is a device pointer, and the GPU must have written all of it
 * before rb_publish_commit. RB_ERR_FULL if until the timeout slow workers read all buffers
 * but those of the last two good versions. */
RB_API int rb_publish_begin(rb_publisher publisher, int64_t timeout, void **buffer);
/* Makes the buffer the current version. A request that is committed after this call is
 * answered with this version or a later one. Without a broker the version is published
 * when there is one (rb_publish_check). RB_ERR_INVALID after version 4294967295. */
RB_API int rb_publish_commit(rb_publisher publisher, uint32_t *version);
/* The latest version of this publisher that was withdrawn, because a worker could not load
 * it or by hand; 0: none. reason gets at most room bytes of text; it may be NULL. */
RB_API int rb_publish_withdrawn(rb_publisher publisher, uint32_t *version, char *reason, uint32_t room);
/* After a restart of the broker: attaches again, and publishes the last version once more.
 * rb_publish_begin and rb_publish_commit do so, too. */
RB_API int rb_publish_check(rb_publisher publisher);
/* Workers keep the last version. */
RB_API int rb_publish_close(rb_publisher publisher);

/* With options->wait, the call waits for the first version. Without options->device, weights
 * in device memory are refused. */
RB_API int rb_follow_open(const char *model, const rb_connect_options *options, rb_follower *follower);
/* RB_ERR_INVALID for the k after the last. */
RB_API int rb_follow_tensor(rb_follower follower, uint32_t k, rb_tensor *tensor);
RB_API int rb_follow_device(rb_follower follower, struct rb_device *device);
/* Before a batch: the version in force and its buffer, which no publisher writes until
 * rb_follow_exit. While other threads have an older version, the call waits for their exit.
 * If *changed is 1, load the version, then call rb_follow_loaded or rb_follow_refuse. In
 * device memory, the GPU must have read the buffer before rb_follow_exit. If no version is
 * in force: RB_ERR_FAILED, and *version is what was loaded last, or 0 if that was withdrawn.
 *
 * After a restart of the broker the follower keeps its weights, and attaches again in this
 * call, which takes 2 ms longer then, less and less often. */
RB_API int rb_follow_enter(rb_follower follower, uint32_t *version, const void **buffer, uint32_t *changed);
/* The version in force, 0 if there is none: what rb_follow_enter would find once no thread has an older one. */
RB_API int rb_follow_current(rb_follower follower, uint32_t *version);
RB_API int rb_follow_loaded(rb_follower follower);
/* The version cannot be loaded: withdraws it, and is the exit. The next rb_follow_enter has the
 * version before; RB_ERR_FAILED with the reason if there is none. */
RB_API int rb_follow_refuse(rb_follower follower, const char *reason);
RB_API int rb_follow_exit(rb_follower follower);
/* Buffers are invalid afterwards. No thread may be between enter and exit. */
RB_API int rb_follow_close(rb_follower follower);

/* The version that answered an ended request; 0 if it failed, or the model has none. */
RB_API int rb_request_version(rb_client client, uint64_t request, uint32_t *version);

/* The version of the weights that made the answers of this batch, 0 if none: its
 * clients see it. */
RB_API int rb_batch_set_version(rb_batch *batch, uint32_t version);

#ifdef __cplusplus
}
#endif
#endif
