/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of the program share; see every.c.
 */
#ifndef EVERY_H
#define EVERY_H

#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "ringbatch.h"

static const int64_t second = 1000000000, minute = 60000000000; /* a minute: what is waited for comes, on a busy machine too */
extern const char *socket_path;
extern atomic_int held_back; /* the worker has its batch, and answers once this is 0: however long that takes */

#define WANT(status, call) want(status, call, #call, __FILE__, __LINE__)
#define CHECK(cond) ((cond) ? (void)0 : fail(#cond, __FILE__, __LINE__))

static inline void fail(const char *what, const char *file, int line)
{
	fprintf(stderr, "%s:%d: %s (last error: %s)\n", file, line, what, rb_error());
	exit(1);
}

static inline void want(int status, int got, const char *call, const char *file, int line)
{
	if (got != status) {
		fprintf(stderr, "%s:%d: %s\n  is %s (%s), expected %s\n", file, line, call, rb_status_name(got), rb_error(), rb_status_name(status));
		exit(1);
	}
}

rb_client dial(const char *model, uint32_t window);

/* serving.c */
extern atomic_int stop; /* both workers end */
void *run_worker(void *words); /* NULL: the one of fixed rows */

/* misuse.c */
void wrong_arguments(void);
void thread_ends(void);
void no_descriptors(void);
void errors_have_names(void);
void forked(void);
void unwritten(void);
void signals(void);

/* reaping.c */
void reaping(void);

#endif
