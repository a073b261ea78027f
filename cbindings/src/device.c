/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Device memory of a ring: CUDA's virtual memory API, with POSIX descriptors as
 * shareable handles. The first ring that needs the driver loads it.
 *
 *	a worker    allocate: create, clear, export        a descriptor, which keeps the memory
 *	everybody   import: import, reserve, map, access    a device pointer of this process
 *
 * The memory has no name: it goes with its last descriptor and mapping.
 */
#include <dlfcn.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "internal.h"

/* ---- the driver ------------------------------------------------------------ */

typedef int result;              /* CUresult */
typedef unsigned long long addr; /* CUdeviceptr, and handles of memory */

typedef struct {
	int type, number;
} location;

typedef struct {
	int type, handles;
	location location;
	void *unused;
	unsigned char compression, rdma;
	unsigned short usage;
	unsigned char reserved[4];
} properties; /* CUmemAllocationProp */

typedef struct {
	location location;
	int flags;
} access_to; /* CUmemAccessDesc */

enum {
	OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, NOT_READY = 600, /* results */
	ON_DEVICE = 1, PINNED = 1, POSIX_DESCRIPTOR = 1, READ_WRITE = 3, /* of the structs above */
	HAS_VIRTUAL_MEMORY = 102, EXPORTS_DESCRIPTORS = 103,             /* attributes of a device */
};

static struct {
	pthread_mutex_t mu;
	bool loaded;
	pid_t by; /* the process that initialised the driver; its forks have no CUDA */
	char why[200];
	result (*init)(unsigned), (*count)(int *), (*get)(int *, int), (*uuid)(unsigned char[16], int), (*attribute)(int *, int, int);
	result (*retain)(void **, int), (*release)(int), (*push)(void *), (*pop)(void **), (*synchronize)(void), (*room)(size_t *, size_t *);
	result (*create)(addr *, size_t, const properties *, addr), (*forget)(addr), (*export)(int *, addr, int, addr),
		(*import)(addr *, void *, int);
	result (*reserve)(addr *, size_t, size_t, addr, addr), (*free)(addr, size_t), (*map)(addr, size_t, size_t, addr, addr),
		(*unmap)(addr, size_t);
	result (*allow)(addr, size_t, const access_to *, size_t), (*clear)(addr, unsigned char, size_t), (*copy)(addr, addr, size_t), (*query)(void *),
		(*host_function)(void *, void (*)(void *), void *);
	result (*name)(result, const char **);
} cuda = {.mu = PTHREAD_MUTEX_INITIALIZER};

static const char *named(result r)
{
	const char *text = NULL;
	return cuda.name && !cuda.name(r, &text) && text ? text : "an unknown error of the CUDA driver";
}

static int no_gpu(const char *why) { return rb_explain(RB_ERR_NO_GPU, "%s", why); }

static int forked(void)
{
	return no_gpu("CUDA was initialised before this process was forked, and does not survive that; "
		      "start the process by spawn or exec, or fork before CUDA is used");
}

/* Finds the functions. The caller holds mu. */
static bool load(void)
{
	const struct {
		void *to;
		const char *name;
	} functions[] = {
		{&cuda.init, "cuInit"}, {&cuda.count, "cuDeviceGetCount"}, {&cuda.get, "cuDeviceGet"}, {&cuda.uuid, "cuDeviceGetUuid_v2"},
		{&cuda.attribute, "cuDeviceGetAttribute"}, {&cuda.retain, "cuDevicePrimaryCtxRetain"},
		{&cuda.release, "cuDevicePrimaryCtxRelease_v2"}, {&cuda.push, "cuCtxPushCurrent_v2"}, {&cuda.pop, "cuCtxPopCurrent_v2"},
		{&cuda.synchronize, "cuCtxSynchronize"}, {&cuda.room, "cuMemGetInfo_v2"},
		{&cuda.create, "cuMemCreate"}, {&cuda.forget, "cuMemRelease"}, {&cuda.export, "cuMemExportToShareableHandle"},
		{&cuda.import, "cuMemImportFromShareableHandle"},
		{&cuda.reserve, "cuMemAddressReserve"}, {&cuda.free, "cuMemAddressFree"}, {&cuda.map, "cuMemMap"}, {&cuda.unmap, "cuMemUnmap"},
		{&cuda.allow, "cuMemSetAccess"}, {&cuda.clear, "cuMemsetD8_v2"}, {&cuda.copy, "cuMemcpyDtoD_v2"}, {&cuda.host_function, "cuLaunchHostFunc"},
		{&cuda.query, "cuStreamQuery"}, {&cuda.name, "cuGetErrorName"},
	};
	const char *path = secure_getenv("RINGBATCH_LIBCUDA");
	void *library = dlopen(path && *path ? path : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	if (!library) {
		snprintf(cuda.why, sizeof cuda.why, "%s", dlerror());
		return false;
	}
	for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
		void *f = dlsym(library, functions[i].name);
		if (!f) {
			snprintf(cuda.why, sizeof cuda.why, "the CUDA driver has no %s; it is too old (11.4 or later)", functions[i].name);
			dlclose(library);
			return false;
		}
		memcpy(functions[i].to, &f, sizeof f);
	}
	return true;
}

/* Starts the driver, and counts the GPUs that it shows this process. */
static int start(int *count)
{
	pthread_mutex_lock(&cuda.mu);
	cuda.loaded = cuda.loaded || load();
	pthread_mutex_unlock(&cuda.mu);
	if (!cuda.loaded)
		return no_gpu(cuda.why);
	if (cuda.by && cuda.by != getpid())
		return forked();
	result r = cuda.init(0);
	if (!r)
		r = cuda.count(count);
	if (r == NOT_INITIALIZED) /* the driver's answer in a forked child */
		return forked();
	if (r == NO_DEVICE || (!r && !*count))
		return no_gpu("the CUDA driver shows this process no device (CUDA_VISIBLE_DEVICES?)");
	if (r)
		return no_gpu(named(r));
	cuda.by = getpid();
	return RB_OK;
}

/* The UUID as nvidia-smi prints it. */
static result uuid_of(int device, char gpu[RB_GPU_BYTES])
{
	unsigned char u[16];
	result r = cuda.uuid(u, device);
	int n = snprintf(gpu, RB_GPU_BYTES, "GPU-");
	for (int i = 0; i < 16; i++)
		n += snprintf(gpu + n, (size_t)(RB_GPU_BYTES - n), "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", r ? 0 : u[i]);
	return r;
}

/* ---- the primary context ---------------------------------------------------- */

static int enter(int device, void **context)
{
	result r = cuda.retain(context, device);
	if (!r && (r = cuda.push(*context)))
		cuda.release(device);
	if (r == OUT_OF_MEMORY)
		return rb_explain(RB_ERR_NO_MEMORY, "no device memory is left for a CUDA context");
	return r == NOT_INITIALIZED ? forked() : r ? no_gpu(named(r)) : RB_OK;
}

static void pop(void)
{
	void *was;
	cuda.pop(&was);
}

static void leave(int device)
{
	pop();
	cuda.release(device);
}

/* Whether this process may use the device's context, which is then the current one. */
static bool push(const rb_device *d) { return cuda.by == getpid() && !cuda.push(d->context); }

/* ---- mapping: in the context of the device ------------------------------------ */

static int refused(result r, uint64_t bytes, const char *what)
{
	size_t left = 0, all = 0;
	if (r == OUT_OF_MEMORY) {
		cuda.room(&left, &all);
		return rb_explain(RB_ERR_NO_MEMORY, "%s %" PRIu64 " MiB of device memory; %zu of %zu MiB are free; "
				  "lower the model's slots, or give the GPU to fewer", what, bytes >> 20, left >> 20, all >> 20);
	}
	return rb_explain(RB_ERR_LAYOUT, "%s %" PRIu64 " bytes of device memory: %s", what, bytes, named(r));
}

static result map(addr handle, uint64_t bytes, int device, addr *at)
{
	result r = cuda.reserve(at, bytes, 0, 0, 0);
	if (r)
		return r;
	if (!(r = cuda.map(*at, bytes, 0, handle, 0))) {
		access_to all = {{ON_DEVICE, device}, READ_WRITE};
		if (!(r = cuda.allow(*at, bytes, &all, 1)))
			return r;
		cuda.unmap(*at, bytes);
	}
	cuda.free(*at, bytes);
	return r;
}

static void unmap(addr at, uint64_t bytes)
{
	cuda.unmap(at, bytes);
	cuda.free(at, bytes);
}

/* ---- for the rest of the library ------------------------------------------------ */

/* Clears the memory first: it may hold another program's data. */
static result export_cleared(addr handle, uint64_t bytes, int device, int *fd)
{
	addr at;
	result r = map(handle, bytes, device, &at);
	if (r)
		return r;
	if (!(r = cuda.clear(at, 0, bytes)))
		r = cuda.synchronize();
	unmap(at, bytes);
	return r ? r : cuda.export(fd, handle, POSIX_DESCRIPTOR, 0);
}

int rb_device_allocate(uint64_t bytes, uint64_t number, int *fd, char gpu[RB_GPU_BYTES])
{
	int count, device, has = 0, exports = 0;
	void *context;
	int status = start(&count);
	if (status)
		return status;
	if (number >= (uint64_t)count)
		return rb_explain(RB_ERR_WRONG_GPU, "device:%" PRIu64 " is to hold it, and this worker sees %d", number, count);
	result r = cuda.get(&device, (int)number);
	if (!r)
		r = uuid_of(device, gpu);
	if (r)
		return no_gpu(named(r));
	cuda.attribute(&has, HAS_VIRTUAL_MEMORY, device);
	cuda.attribute(&exports, EXPORTS_DESCRIPTORS, device);
	if (!has || !exports)
		return no_gpu("this GPU, or its driver, cannot share memory by descriptors");
	if ((status = enter(device, &context)))
		return status;
	properties p = {.type = PINNED, .handles = POSIX_DESCRIPTOR, .location = {ON_DEVICE, device}};
	addr handle;
	if (!(r = cuda.create(&handle, bytes, &p, 0))) {
		r = export_cleared(handle, bytes, device, fd);
		cuda.forget(handle); /* the descriptor keeps the memory */
	}
	if (r)
		status = refused(r, bytes, "allocating");
	leave(device);
	return status;
}

/* Finds the GPU with that UUID, or lists the GPUs that there are. */
static int find(const char *gpu, int *device)
{
	char other[RB_GPU_BYTES], seen[256] = "";
	int count, status = start(&count);
	for (int i = 0; i < count && !status; i++) {
		if (cuda.get(device, i) || uuid_of(*device, other))
			continue;
		if (!strcmp(other, gpu))
			return RB_OK;
		snprintf(seen + strlen(seen), sizeof seen - strlen(seen), "%s%s", *seen ? ", " : "", other);
	}
	return status ? status : rb_explain(RB_ERR_WRONG_GPU, "it is on %s, this process sees %s (CUDA_VISIBLE_DEVICES?)", gpu, seen);
}

int rb_device_import(rb_device *d, int fd, uint64_t bytes, const char *gpu)
{
	int device;
	addr handle, at;
	void *context;
	rb_device_close(NULL); /* unmaps postponed memory */
	int status = find(gpu, &device);
	if (!status)
		status = enter(device, &context);
	if (status)
		return status;
	result r = cuda.import(&handle, (void *)(intptr_t)fd, POSIX_DESCRIPTOR);
	if (!r) {
		r = map(handle, bytes, device, &at);
		cuda.forget(handle); /* the mapping keeps the memory */
	}
	if (r) {
		status = refused(r, bytes, "importing");
		leave(device);
		return status;
	}
	pop();
	*d = (rb_device){.size = sizeof *d, .ordinal = device, .base = at, .bytes = bytes, .context = context};
	snprintf(d->gpu, sizeof d->gpu, "%s", gpu);
	return RB_OK;
}

bool rb_device_idle(const rb_device *d, void *stream, int64_t until)
{
	if (!push(d))
		return false;
	result r;
	do
		r = cuda.query(stream);
	while (r == NOT_READY && rb_now() < until);
	pop();
	return !r;
}

int rb_device_launch(const rb_device *d, void *stream, void (*f)(void *), void *argument)
{
	if (cuda.by != getpid())
		return forked();
	result r = cuda.push(d->context);
	if (!r) {
		r = cuda.host_function(stream, f, argument);
		pop();
	}
	return r ? rb_explain(RB_ERR_INVALID, "the stream takes no more work: %s", named(r)) : RB_OK;
}

bool rb_device_broken(const rb_device *d)
{
	size_t left, all;
	if (!push(d))
		return true;
	result r = cuda.room(&left, &all); /* after a sticky error every call fails */
	pop();
	return r;
}

/* ---- the end ---------------------------------------------------------------------- */

/* A host function may not call the driver. Memory that it would unmap waits here until the next thread opens or closes
 * device memory. */
static _Thread_local bool in_host_function;

static struct {
	pthread_mutex_t mu;
	rb_device *_Atomic list;
	uint32_t count, room;
} later = {.mu = PTHREAD_MUTEX_INITIALIZER};

void rb_device_host_function(bool runs) { in_host_function = runs; }

/* Without memory for the list, the mapping stays until the process ends. */
static void postpone(const rb_device *d)
{
	pthread_mutex_lock(&later.mu);
	if (later.count == later.room) {
		rb_device *more = realloc(later.list, (later.room + 16) * sizeof *more);
		if (more) {
			later.list = more;
			later.room += 16;
		}
	}
	if (later.count < later.room)
		later.list[later.count++] = *d;
	pthread_mutex_unlock(&later.mu);
}

/* The end of a call that was pushed: waits for the GPU. */
static int finish(result r, uint64_t bytes, const char *what)
{
	if (!r)
		r = cuda.synchronize();
	pop();
	return r ? refused(r, bytes, what) : RB_OK;
}

int rb_device_clear(const rb_device *d, uint64_t at, uint64_t bytes)
{
	return push(d) ? finish(cuda.clear(at, 0, bytes), bytes, "clearing") : forked();
}

int rb_device_copy(const rb_device *d, const void *to, const void *from, uint64_t bytes)
{
	return push(d) ? finish(cuda.copy((addr)(uintptr_t)to, (addr)(uintptr_t)from, bytes), bytes, "copying") : forked();
}

void rb_device_synchronize(const rb_device *d)
{
	if (!d->base || in_host_function || !push(d))
		return;
	cuda.synchronize();
	pop();
}

static void close_now(const rb_device *d)
{
	if (!push(d))
		return;
	cuda.synchronize(); /* this process's GPU work has ended */
	unmap(d->base, d->bytes);
	leave(d->ordinal);
}

void rb_device_close(rb_device *d)
{
	if (d && d->base && in_host_function)
		postpone(d);
	else if (d && d->base)
		close_now(d);
	if (d)
		*d = (rb_device){.size = sizeof *d, .ordinal = -1};
	while (!in_host_function) {
		rb_device old;
		pthread_mutex_lock(&later.mu);
		bool some = later.count;
		if (some)
			old = later.list[--later.count];
		pthread_mutex_unlock(&later.mu);
		if (!some)
			return;
		close_now(&old);
	}
}

void rb_device_in_child(void)
{
	pthread_mutex_init(&cuda.mu, NULL);
	pthread_mutex_init(&later.mu, NULL);
	later.count = 0;
}
