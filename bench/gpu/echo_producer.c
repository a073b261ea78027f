/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A producer over the C ABI; bench/gpu/device_ring.py starts several. It keeps IN_FLIGHT
 * requests in flight, commits them in groups and checks every 512th answer: an echo must
 * equal its input, another model's answer the first answer to the same row.
 *
 *   echo_producer MODEL IN_FLIGHT GROUP device|copies|host|plain|cpu
 *
 * device: its rows are on the GPU, are written into slots there by one kernel for the group, and committed on the stream.
 * copies: the same by a copy for each row.
 * host:   its rows are on the GPU, are copied into slots in host memory, which it has pinned, and waited for.
 * plain:  the same, and the slots are not pinned.
 * cpu:    its rows are in host memory, as the slots are.
 *
 * On standard input: a byte to begin, end of file to end. On standard output:
 * "ready", then one line of JSON.
 */
#include <cuda.h>
#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ringbatch.h"

#define CUDA(call)                                                                        \
	do {                                                                              \
		CUresult result = (call);                                                 \
		const char *name = "no driver";                                           \
		if (result) {                                                             \
			cuGetErrorName(result, &name);                                    \
			fprintf(stderr, "line %d: %s: %s\n", __LINE__, #call, name);      \
			exit(1);                                                          \
		}                                                                         \
	} while (0)
#define RB(call)                                                                          \
	do {                                                                              \
		int status = (call);                                                      \
		if (status) {                                                             \
			fprintf(stderr, "line %d: %s: %s: %s\n", __LINE__, #call, rb_status_name(status), rb_error()); \
			exit(1);                                                          \
		}                                                                         \
	} while (0)

/* What moves rows by slot numbers: the workers' kernel. */
__asm__(".section .rodata\nmove_ptx: .incbin \"worker/cuda/kernels/move.ptx\"\n.byte 0\n.previous\n");
extern const char move_ptx[];

enum { MOVE_BLOCKS = 64, MOVE_THREADS = 512 };

enum { SOURCES = 8, LOOK = 512, MOST = 256, TIMES = 1 << 20 };

const char *ringbatch_cuda_load(void); /* of build/cuda/lib/libcuda.a: NULL, or why there is no driver */

static int64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static int compare(const void *a, const void *b)
{
	int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
	return x < y ? -1 : x > y;
}

static rb_client client;
static CUstream stream;
static CUdeviceptr source[SOURCES]; /* rows, each of one number, one after the other; behind the last the first ones again */
static CUdeviceptr plane, numbers;  /* the slots' rows; where the kernel reads which ones */
static uint32_t *slots;             /* which ones, pinned: of the requests in flight */
static CUfunction scatter;
static uint64_t row_bytes;
static int on_device, by_kernel, on_cpu, answers_on_device;
static uint64_t answer_bytes;
static void *host_source[SOURCES];
static uint64_t ids[MOST];
static int64_t began[MOST], *took;
static uint64_t sent, done, wrong;
static rb_timing sum; /* where the time went */

/* send commits a group of rows; where they wait for the GPU it is not waited for here. */
static void send(unsigned in_flight, unsigned group)
{
	uint64_t some[MOST];
	uint32_t *own = slots + sent % in_flight;
	CUdeviceptr first = source[sent % SOURCES];
	for (unsigned i = 0; i < group; i++, sent++) {
		rb_request r;
		rb_view x;
		began[sent % in_flight] = now_ns();
		RB(rb_claim(client, 1, NULL, 0, -1, &r));
		RB(rb_input(client, r.id, 0, &x));
		own[i] = r.slot;
		if (by_kernel)
			plane = (CUdeviceptr)(uintptr_t)x.data - r.slot * row_bytes;
		else if (on_device)
			CUDA(cuMemcpyDtoDAsync((CUdeviceptr)(uintptr_t)x.data, source[sent % SOURCES], row_bytes, stream));
		else if (on_cpu)
			memcpy(x.data, host_source[sent % SOURCES], row_bytes);
		else
			CUDA(cuMemcpyDtoHAsync(x.data, source[sent % SOURCES], row_bytes, stream));
		some[i] = ids[sent % in_flight] = r.id;
	}
	if (by_kernel) {
		uint64_t bytes = row_bytes, rows = group;
		void *arguments[] = {&plane, &bytes, &first, &bytes, &numbers, &bytes, &rows};
		CUDA(cuMemcpyHtoDAsync(numbers, own, group * sizeof *own, stream));
		CUDA(cuLaunchKernel(scatter, MOVE_BLOCKS, 1, 1, MOVE_THREADS, 1, 1, 0, stream, arguments, NULL));
	}
	if (on_device) {
		RB(rb_commit_on_stream(client, some, group, stream, 0, 0));
		return;
	}
	if (!on_cpu)
		CUDA(cuStreamSynchronize(stream));
	RB(rb_commit_all(client, some, group, 0, 0));
}

/* The value of all elements of a row. */
static uint32_t element(unsigned from)
{
	float value = (float)(from + 1) / SOURCES;
	uint32_t bits;
	memcpy(&bits, &value, sizeof bits);
	return bits;
}

/* Within two per cent of the largest number. */
static int like(const float *a, const float *b, uint64_t n)
{
	float most = 0;
	for (uint64_t i = 0; i < n; i++)
		most = fmaxf(most, fabsf(b[i]));
	for (uint64_t i = 0; i < n; i++)
		if (!(fabsf(a[i] - b[i]) <= 0.02f * most))
			return 0;
	return most > 0;
}

/* look compares a whole answer with its input, or with the first answer to the same row. */
static void look(uint64_t request, unsigned from)
{
	static float *answer, *first[SOURCES];
	rb_view y;
	if (!answer)
		answer = malloc(answer_bytes);
	RB(rb_output(client, request, 0, &y));
	if (answers_on_device)
		CUDA(cuMemcpyDtoH(answer, (CUdeviceptr)(uintptr_t)y.data, answer_bytes));
	else
		memcpy(answer, y.data, answer_bytes);
	if (answer_bytes != row_bytes) {
		if (!first[from]) {
			first[from] = malloc(answer_bytes);
			memcpy(first[from], answer, answer_bytes);
		}
		wrong += !like(answer, first[from], answer_bytes / 4);
		return;
	}
	uint32_t want = element(from);
	for (uint64_t i = 0; i < row_bytes / 4; i++)
		if (memcmp(answer + i, &want, 4)) {
			wrong++;
			return;
		}
}

static void receive(unsigned in_flight)
{
	uint64_t request = ids[done % in_flight];
	RB(rb_wait(client, request, -1));
	took[done % TIMES] = now_ns() - began[done % in_flight];
	rb_timing t;
	RB(rb_request_timing(client, request, &t));
	sum.claim += t.claim, sum.write += t.write, sum.queue += t.queue;
	sum.dispatch += t.dispatch, sum.compute += t.compute, sum.wake += t.wake;
	if (done % LOOK == done / LOOK % SOURCES)
		look(request, done % SOURCES);
	RB(rb_release(client, request)); /* nothing that was queued reads it */
	done++;
}

static int ended(void)
{
	struct pollfd p = {.fd = 0, .events = POLLIN};
	char byte;
	return poll(&p, 1, 0) == 1 && read(0, &byte, 1) == 0;
}

int main(int argc, char **argv)
{
	if (argc != 5) {
		fprintf(stderr, "usage: echo_producer MODEL IN_FLIGHT GROUP device|copies|host|plain|cpu\n");
		return 2;
	}
	unsigned in_flight = (unsigned)atoi(argv[2]), group = (unsigned)atoi(argv[3]);
	by_kernel = !strcmp(argv[4], "device");
	on_device = by_kernel || !strcmp(argv[4], "copies");
	on_cpu = !strcmp(argv[4], "cpu");
	if (!in_flight || in_flight > MOST || !group || in_flight % group) {
		fprintf(stderr, "in flight: 1..%d, a multiple of the group\n", MOST);
		return 2;
	}
	CUdevice device;
	CUcontext context;
	const char *missing = ringbatch_cuda_load();
	if (missing) {
		fprintf(stderr, "no GPU here: %s\n", missing);
		return 1;
	}
	CUDA(cuInit(0));
	CUDA(cuDeviceGet(&device, 0));
	CUDA(cuDevicePrimaryCtxRetain(&context, device));
	CUDA(cuCtxSetCurrent(context));
	CUDA(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));

	rb_connect_options o = {.size = sizeof o, .window = in_flight, .timeout = INT64_C(30000000000), .wait = 1,
				.device = (uint32_t)on_device};
	rb_tensor x, y;
	rb_map map;
	RB(rb_connect(argv[1], &o, &client));
	RB(rb_client_tensor(client, RB_INPUT, 0, &x));
	RB(rb_client_map(client, &map));
	RB(rb_client_tensor(client, RB_OUTPUT, 0, &y));
	row_bytes = x.row_bytes;
	answer_bytes = y.row_bytes;
	answers_on_device = y.on_device;
	if (!strcmp(argv[4], "host"))
		CUDA(cuMemHostRegister(map.base, map.bytes, 0));
	CUDA(cuMemHostAlloc((void **)&slots, MOST * sizeof *slots, 0));
	if (by_kernel) {
		CUmodule module;
		CUDA(cuModuleLoadData(&module, move_ptx));
		CUDA(cuModuleGetFunction(&scatter, module, "rb_scatter"));
		CUDA(cuMemAlloc(&numbers, MOST * sizeof *slots));
		if (x.stride != row_bytes)
			return 1;
	}
	CUDA(cuMemAlloc(&source[0], (SOURCES + group) * row_bytes));
	for (unsigned i = 0; i < SOURCES + group; i++)
		CUDA(cuMemsetD32(source[0] + i * row_bytes, element(i % SOURCES), row_bytes / 4));
	for (unsigned i = 0; i < SOURCES; i++) {
		source[i] = source[0] + i * row_bytes;
		host_source[i] = malloc(row_bytes);
		CUDA(cuMemcpyDtoH(host_source[i], source[i], row_bytes));
	}
	CUDA(cuCtxSynchronize());
	took = calloc(TIMES, sizeof *took);
	printf("ready\n");
	fflush(stdout);
	char byte;
	if (read(0, &byte, 1) != 1)
		return 1;

	int64_t start = now_ns();
	while (sent < in_flight)
		send(in_flight, group);
	while (!ended()) {
		for (unsigned i = 0; i < group; i++)
			receive(in_flight);
		send(in_flight, group);
	}
	uint64_t items = done;
	double seconds = 1e-9 * (double)(now_ns() - start);
	while (done < sent)
		receive(in_flight);
	uint64_t n = items < TIMES ? items : TIMES;
	qsort(took, n, sizeof *took, compare);
	double each = 1e-3 / (double)done;
	printf("{\"items\": %llu, \"seconds\": %.6f, \"wrong\": %llu, \"p50\": %.2f, \"p99\": %.2f, \"us\": "
	       "{\"claim\": %.1f, \"write\": %.1f, \"queue\": %.1f, \"dispatch\": %.1f, \"compute\": %.1f, \"wake\": %.1f}}\n",
	       (unsigned long long)items, seconds, (unsigned long long)wrong,
	       n ? 1e-3 * (double)took[n / 2] : 0, n ? 1e-3 * (double)took[n * 99 / 100] : 0,
	       each * (double)sum.claim, each * (double)sum.write, each * (double)sum.queue,
	       each * (double)sum.dispatch, each * (double)sum.compute, each * (double)sum.wake);
	RB(rb_close(client));
	return wrong != 0;
}
