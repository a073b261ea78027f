/* SPDX-License-Identifier: Apache-2.0 */
/* For all files of the program; see every.c. */
#ifndef EVERY_H
#define EVERY_H

#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "ringbatch.h"

static const int64_t second = 1000000000, minute = 60000000000; /* long enough on a busy machine */
extern const char *socket_path;
extern atomic_int held_back; /* the worker keeps its batch until this is 0 */

#define WANT(status, call) want(status, call, #call, __FILE__, __LINE__)
/* Every one of the calls gives this status. */
#define WANT_ALL(status, ...) \
	want_all(status, (const int[]){__VA_ARGS__}, sizeof((const int[]){__VA_ARGS__}) / sizeof(int), #__VA_ARGS__, __FILE__, __LINE__)
#define CHECK(cond) ((cond) ? (void)0 : fail(#cond, __FILE__, __LINE__))

static inline void fail(const char *what, const char *file, int line)
{
	fprintf(stderr, "%s:%d: %s (last error: %s)\n", file, line, what, rb_error());
	exit(1);
}

static inline void want(int status, int got, const char *call, const char *file, int line)
{
	if (got != status) {
		fprintf(stderr, "%s:%d: %s\n  is %s (%s), expected %s\n", file, line, call, rb_status_name(got), rb_error(),
			rb_status_name(status));
		exit(1);
	}
}

static inline void want_all(int status, const int *got, size_t count, const char *calls, const char *file, int line)
{
	for (size_t i = 0; i < count; i++)
		if (got[i] != status) {
			fprintf(stderr, "call %zu of:\n", i + 1);
			want(status, got[i], calls, file, line);
		}
}

static inline int64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * second + t.tv_nsec;
}

/* The sizes of a model's inputs, or of its outputs. */
#define BYTES(...) ((const uint64_t[]){__VA_ARGS__})

rb_client dial(const char *model, uint32_t window);

/* serving.c */
extern atomic_int stop; /* the worker ends */
void *run_worker(void *none);

/* misuse.c */
void wrong_arguments(void);
void thread_ends(void);
void no_descriptors(void);
void errors_have_names(void);
void structs_grow(void);
void forked(void);
void unwritten(void);
void packed(void);
void signals(void);

/* sequences.c */
void sequences(void);

/* reaping.c */
void reaping(void);

#endif
