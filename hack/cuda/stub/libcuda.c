/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A CUDA driver without a GPU, for tests: cc -shared -fPIC -pthread -o libcuda.so.1 libcuda.c
 *
 * Device memory is a memfd and a device pointer an address of this process. So
 * processes share memory by descriptors, as with the real driver, and /proc shows
 * them. Streams are threads that do their work in order. As with the real driver, a
 * call in a host function is an error (abort), and so is a call after a fork.
 *
 *	STUB_CUDA_GPUS=ab      two GPUs, whose UUIDs are made of these letters ("a" by default; empty: none)
 *	STUB_CUDA_BYTES=N      the memory of each GPU (1 GiB by default)
 *	STUB_CUDA_DELAY_US=N   a copy on a stream pauses for N µs in its middle
 *	STUB_CUDA_GATE=FILE    or until FILE exists
 *	STUB_CUDA_BROKEN=FILE  while FILE exists, every call fails, as after an illegal access
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef int CUresult;
typedef unsigned long long CUdeviceptr, CUhandle;

enum { OK, INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
	INVALID_HANDLE = 400, NOT_READY = 600, ILLEGAL_ADDRESS = 700, NOT_SUPPORTED = 801, UNKNOWN = 999 };
#define GRAIN (2 << 20)
#define MEMFD "stub-cuda-" /* and the GPU's letter */

static pid_t initialised_by;
static __thread bool in_host_function;
static __thread int current = -1; /* device + 1 of the context, on a stack of one */

static const char *gpus(void)
{
	const char *s = getenv("STUB_CUDA_GPUS");
	return s ? s : "a";
}

static size_t limit(void)
{
	const char *s = getenv("STUB_CUDA_BYTES");
	return s ? strtoull(s, NULL, 10) : (size_t)1 << 30;
}

static bool exists(const char *variable)
{
	const char *path = getenv(variable);
	return path && !access(path, F_OK);
}

/* Every call begins with this. */
static CUresult call(const char *name)
{
	if (in_host_function) {
		fprintf(stderr, "stub cuda: %s inside of a host function\n", name);
		abort();
	}
	if (initialised_by != getpid())
		return NOT_INITIALIZED;
	return exists("STUB_CUDA_BROKEN") ? ILLEGAL_ADDRESS : OK;
}
#define CALL                                      \
	do {                                      \
		CUresult refused = call(__func__); \
		if (refused)                      \
			return refused;           \
	} while (0)

CUresult cuInit(unsigned flags)
{
	(void)flags;
	if (initialised_by && initialised_by != getpid())
		return NOT_INITIALIZED;
	if (!*gpus())
		return NO_DEVICE;
	initialised_by = getpid();
	return OK;
}

CUresult cuGetErrorName(CUresult r, const char **text)
{
#define NAME(n) case n: *text = "CUDA_ERROR_" #n; return OK
	switch (r) {
		NAME(OUT_OF_MEMORY); NAME(INVALID_VALUE); NAME(INVALID_HANDLE); NAME(NO_DEVICE); NAME(NOT_INITIALIZED);
		NAME(INVALID_DEVICE); NAME(INVALID_CONTEXT); NAME(ILLEGAL_ADDRESS); NAME(NOT_SUPPORTED);
	}
	*text = "CUDA_ERROR_UNKNOWN";
	return OK;
}

/* ---- devices and contexts ----------------------------------------------------- */

CUresult cuDeviceGetCount(int *n) { CALL; *n = (int)strlen(gpus()); return OK; }
CUresult cuDeviceGetUuid_v2(unsigned char uuid[16], int device) { CALL; memset(uuid, gpus()[device], 16); return OK; }
CUresult cuDevicePrimaryCtxRetain(void **context, int device) { CALL; *context = (void *)(intptr_t)(device + 1); return OK; }

CUresult cuDeviceGet(int *device, int i)
{
	CALL;
	*device = i;
	return i >= 0 && i < (int)strlen(gpus()) ? OK : INVALID_DEVICE;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, int device)
{
	(void)attribute, (void)device;
	CALL;
	*value = 1;
	return OK;
}

CUresult cuDevicePrimaryCtxRelease_v2(int device) { (void)device; CALL; return OK; }
CUresult cuCtxPushCurrent_v2(void *context) { CALL; current = (int)(intptr_t)context; return OK; }
CUresult cuCtxSetCurrent(void *context) { return cuCtxPushCurrent_v2(context); }
CUresult cuCtxPopCurrent_v2(void **context) { CALL; *context = (void *)(intptr_t)current; current = -1; return OK; }

/* ---- memory ------------------------------------------------------------------- */

typedef struct {
	int type, handles, where, device;
} properties; /* the head of CUmemAllocationProp */

static _Atomic size_t used;

CUresult cuMemGetInfo_v2(size_t *left, size_t *all) { CALL; *all = limit(); *left = *all > used ? *all - used : 0; return OK; }

CUresult cuMemCreate(CUhandle *handle, size_t bytes, const properties *p, CUhandle flags)
{
	char name[] = MEMFD "?";
	(void)flags;
	CALL;
	if (!bytes || bytes % GRAIN || p->device < 0 || p->device >= (int)strlen(gpus()))
		return INVALID_VALUE;
	if (bytes > limit() || used > limit() - bytes)
		return OUT_OF_MEMORY;
	name[sizeof name - 2] = gpus()[p->device];
	int fd = memfd_create(name, MFD_CLOEXEC);
	if (fd < 0 || ftruncate(fd, (off_t)bytes))
		return OUT_OF_MEMORY;
	*handle = (CUhandle)fd + 1;
	return OK;
}
CUresult cuMemRelease(CUhandle handle) { CALL; return close((int)handle - 1) ? INVALID_VALUE : OK; }

CUresult cuMemExportToShareableHandle(int *fd, CUhandle handle, int type, CUhandle flags)
{
	(void)type, (void)flags;
	CALL;
	*fd = fcntl((int)handle - 1, F_DUPFD_CLOEXEC, 0);
	return *fd < 0 ? INVALID_VALUE : OK;
}

CUresult cuMemImportFromShareableHandle(CUhandle *handle, void *os, int type)
{
	char path[64], target[128] = "";
	(void)type;
	CALL;
	snprintf(path, sizeof path, "/proc/self/fd/%d", (int)(intptr_t)os);
	if (readlink(path, target, sizeof target - 1) < 0 || strncmp(target, "/memfd:" MEMFD, strlen("/memfd:" MEMFD)))
		return UNKNOWN;
	int fd = fcntl((int)(intptr_t)os, F_DUPFD_CLOEXEC, 0);
	*handle = (CUhandle)fd + 1;
	return fd < 0 ? INVALID_VALUE : OK;
}

CUresult cuMemAddressReserve(CUdeviceptr *at, size_t bytes, size_t align, CUdeviceptr hint, CUhandle flags)
{
	(void)align, (void)hint, (void)flags;
	CALL;
	void *p = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	*at = (CUdeviceptr)(uintptr_t)p;
	return p == MAP_FAILED ? OUT_OF_MEMORY : OK;
}
CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes) { CALL; return munmap((void *)(uintptr_t)at, bytes) ? INVALID_VALUE : OK; }

CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUhandle handle, CUhandle flags)
{
	struct stat st;
	(void)flags;
	CALL;
	if (bytes % GRAIN || offset || fstat((int)handle - 1, &st))
		return INVALID_VALUE;
	if ((size_t)st.st_size != bytes)
		return NOT_SUPPORTED;
	if (mmap((void *)(uintptr_t)at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, (int)handle - 1, 0) == MAP_FAILED)
		return OUT_OF_MEMORY;
	used += bytes;
	return OK;
}

CUresult cuMemUnmap(CUdeviceptr at, size_t bytes)
{
	CALL;
	if (mmap((void *)(uintptr_t)at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == MAP_FAILED)
		return INVALID_VALUE;
	used -= bytes;
	return OK;
}
CUresult cuMemSetAccess(CUdeviceptr at, size_t bytes, const void *access, size_t count)
{
	(void)at, (void)bytes, (void)access, (void)count;
	CALL;
	return OK;
}

CUresult cuMemAlloc_v2(CUdeviceptr *at, size_t bytes)
{
	CALL;
	*at = (CUdeviceptr)(uintptr_t)calloc(1, bytes);
	return *at ? OK : OUT_OF_MEMORY;
}
CUresult cuMemFree_v2(CUdeviceptr at) { CALL; free((void *)(uintptr_t)at); return OK; }
CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
	CALL;
	memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, bytes);
	return OK;
}
CUresult cuMemsetD8_v2(CUdeviceptr at, unsigned char value, size_t bytes) { CALL; memset((void *)(uintptr_t)at, value, bytes); return OK; }

/* ---- streams ------------------------------------------------------------------ */

typedef struct work {
	struct work *next;
	void (*f)(void *);
	void *argument;
	CUdeviceptr to, from;
	size_t bytes;
} work;

typedef struct stream {
	struct stream *next;
	pthread_mutex_t mu;
	pthread_cond_t more, idle;
	work *first, **last;
	bool busy, ended;
	pthread_t thread;
} stream;

static stream *streams;
static pthread_mutex_t all = PTHREAD_MUTEX_INITIALIZER;
static stream *default_stream;
static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER; /* held while the default stream is made */

/* Copies in two halves with a pause, so that an early reader is noticed. */
static void copy(const work *w)
{
	const char *delay = getenv("STUB_CUDA_DELAY_US");
	uint8_t *to = (void *)(uintptr_t)w->to, *from = (void *)(uintptr_t)w->from;
	memcpy(to, from, w->bytes / 2);
	if (delay)
		usleep((unsigned)atoi(delay));
	while (getenv("STUB_CUDA_GATE") && !exists("STUB_CUDA_GATE") && !exists("STUB_CUDA_BROKEN"))
		usleep(1000);
	memcpy(to + w->bytes / 2, from + w->bytes / 2, w->bytes - w->bytes / 2);
}

static void *serve(void *argument)
{
	stream *s = argument;
	pthread_mutex_lock(&s->mu);
	for (;;) {
		while (!s->first && !s->ended)
			pthread_cond_wait(&s->more, &s->mu);
		if (!s->first)
			break;
		work *w = s->first;
		if (!(s->first = w->next))
			s->last = &s->first;
		s->busy = true;
		pthread_mutex_unlock(&s->mu);
		if (exists("STUB_CUDA_BROKEN")) { /* a failed context runs no more work */
		} else if (w->f) {
			in_host_function = true;
			w->f(w->argument);
			in_host_function = false;
		} else {
			copy(w);
		}
		free(w);
		pthread_mutex_lock(&s->mu);
		s->busy = false;
		pthread_cond_broadcast(&s->idle);
	}
	pthread_mutex_unlock(&s->mu);
	return NULL;
}

CUresult cuStreamCreate(void **out, unsigned flags)
{
	(void)flags;
	CALL;
	stream *s = calloc(1, sizeof *s);
	s->last = &s->first;
	pthread_mutex_init(&s->mu, NULL);
	pthread_cond_init(&s->more, NULL);
	pthread_cond_init(&s->idle, NULL);
	if (pthread_create(&s->thread, NULL, serve, s))
		return OUT_OF_MEMORY;
	pthread_mutex_lock(&all);
	s->next = streams;
	streams = s;
	pthread_mutex_unlock(&all);
	*out = s;
	return OK;
}

static stream *known(void *given)
{
	if ((uintptr_t)given <= 2) {
		void *made = NULL;
		pthread_mutex_lock(&making);
		if (!default_stream && !cuStreamCreate(&made, 0))
			default_stream = made;
		pthread_mutex_unlock(&making);
		return default_stream;
	}
	pthread_mutex_lock(&all);
	stream *s = streams;
	while (s && s != given)
		s = s->next;
	pthread_mutex_unlock(&all);
	return s;
}

static CUresult add(void *given, work w)
{
	stream *s = known(given);
	work *mine = malloc(sizeof *mine);
	if (!s)
		return INVALID_HANDLE;
	*mine = w;
	mine->next = NULL;
	pthread_mutex_lock(&s->mu);
	*s->last = mine;
	s->last = &mine->next;
	pthread_cond_signal(&s->more);
	pthread_mutex_unlock(&s->mu);
	return OK;
}

static void drain(stream *s)
{
	pthread_mutex_lock(&s->mu);
	while (s->first || s->busy)
		pthread_cond_wait(&s->idle, &s->mu);
	pthread_mutex_unlock(&s->mu);
}

CUresult cuLaunchHostFunc(void *s, void (*f)(void *), void *argument)
{
	CALL;
	return current < 0 ? INVALID_CONTEXT : add(s, (work){.f = f, .argument = argument});
}
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, void *s)
{
	CALL;
	return add(s, (work){.to = to, .from = from, .bytes = bytes});
}
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) { CALL; memcpy((void *)(uintptr_t)to, from, bytes); return OK; }
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) { CALL; memcpy(to, (void *)(uintptr_t)from, bytes); return OK; }

CUresult cuStreamQuery(void *given)
{
	CALL;
	stream *s = known(given);
	if (!s)
		return INVALID_HANDLE;
	pthread_mutex_lock(&s->mu);
	bool idle = !s->first && !s->busy;
	pthread_mutex_unlock(&s->mu);
	return idle ? OK : NOT_READY;
}

CUresult cuStreamSynchronize(void *given)
{
	CALL;
	stream *s = known(given);
	if (s)
		drain(s);
	return s ? OK : INVALID_HANDLE;
}

CUresult cuCtxSynchronize(void)
{
	CALL;
	pthread_mutex_lock(&all);
	stream *s = streams;
	pthread_mutex_unlock(&all);
	for (; s; s = s->next)
		drain(s);
	return OK;
}

CUresult cuStreamDestroy_v2(void *given)
{
	CALL;
	stream *s = known(given);
	if (!s || s == default_stream)
		return INVALID_HANDLE;
	pthread_mutex_lock(&all);
	stream **at = &streams;
	while (*at != s)
		at = &(*at)->next;
	*at = s->next;
	pthread_mutex_unlock(&all);
	pthread_mutex_lock(&s->mu);
	s->ended = true;
	pthread_cond_signal(&s->more);
	pthread_mutex_unlock(&s->mu);
	pthread_join(s->thread, NULL);
	free(s);
	return OK;
}
