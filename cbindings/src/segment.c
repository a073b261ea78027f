/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

static int check(int fd, uint64_t bytes)
{
	struct stat st = {0};
	int seals = fcntl(fd, F_GET_SEALS);
	if (seals < 0 || (seals & (int)RB_GO_SEALS) != (int)RB_GO_SEALS)
		return rb_explain(RB_ERR_LAYOUT, "segment is not a sealed memfd");
	if (fstat(fd, &st) || (uint64_t)st.st_size != bytes || bytes < RB_GO_SEGMENT_HEADER)
		return rb_explain(RB_ERR_LAYOUT, "segment has %lld bytes, expected %" PRIu64, (long long)st.st_size, bytes);
	return RB_OK;
}

int rb_segment_open(rb_segment *s, int fd, uint64_t bytes, bool writable)
{
	int status = check(fd, bytes);
	if (!status) {
		void *at = mmap(NULL, bytes, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, fd, 0);
		if (at == MAP_FAILED) {
			status = rb_explain(RB_ERR_NO_MEMORY, "map %" PRIu64 " MiB: %s", bytes >> 20, strerror(errno));
		} else {
			/* A forked child must not write into its parent's slots; it attaches for itself. */
			madvise(at, bytes, MADV_DONTFORK);
			*s = (rb_segment){at, bytes};
		}
	}
	close(fd); /* the mapping stays */
	return status;
}

void rb_segment_close(rb_segment *s)
{
	if (s->at)
		munmap(s->at, s->bytes);
	s->at = NULL;
}

bool rb_segment_detach(rb_segment *s)
{
	const int zeros = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
	if (!s->at || mmap(s->at, s->bytes, PROT_READ | PROT_WRITE, zeros, -1, 0) == MAP_FAILED)
		return !s->at;
	madvise(s->at, s->bytes, MADV_DONTFORK); /* as before: a child gets its own zeros */
	return true;
}

static uint64_t mebibytes(uint64_t bytes) { return (bytes + (1 << 20) - 1) >> 20; }

/* The bytes that the kernel has not backed yet; 0 if it does not say. */
static uint64_t missing(uint8_t *at, uint64_t bytes, uint64_t page)
{
	unsigned char pages[4096];
	uint64_t n = 0;
	while (bytes) {
		uint64_t part = rb_min(bytes, sizeof pages * page);
		if (mincore(at, part, pages))
			return 0;
		for (uint64_t i = 0; i < (part + page - 1) / page; i++)
			n += pages[i] & 1 ? 0 : page;
		at += part;
		bytes -= part;
	}
	return n;
}

rb_range rb_whole_pages(rb_range r, uint64_t page, uint64_t size)
{
	uint64_t from = r.offset / page * page;
	return (rb_range){from, rb_min(rb_round_up(r.offset + r.bytes, page), size) - from};
}

/*
 * At a memory cgroup's limit the kernel kills without notice. So the missing bytes are
 * compared with the groups' room before any page is touched: touched pages stay charged
 * to the group while the ring lives.
 */
int rb_segment_populate(rb_segment *s, const rb_range *ranges, uint32_t count)
{
	uint64_t lacking = 0, page = (uint64_t)sysconf(_SC_PAGESIZE);
	int64_t left, limit;
	char group[512];
	for (int touch = 0; touch < 2; touch++) {
		for (uint32_t i = 0; i < count; i++) {
			rb_range r = rb_whole_pages(ranges[i], page, s->bytes);
			if (!touch)
				lacking += missing(s->at + r.offset, r.bytes, page);
			else if (madvise(s->at + r.offset, r.bytes, MADV_POPULATE_WRITE) && errno != EINVAL) /* kernels before 5.14 fault lazily */
				return rb_explain(RB_ERR_NO_MEMORY, "%" PRIu64 " MiB of shared memory: %s", mebibytes(r.bytes), strerror(errno));
		}
		if (!touch && lacking && rb_cgroup_room(&left, &limit, group, sizeof group) && (int64_t)(lacking + lacking / 64) > left)
			return rb_explain(RB_ERR_NO_MEMORY, "%" PRIu64 " MiB of shared memory, the memory cgroup %s has %lld of %lld MiB left",
				mebibytes(lacking), group, (long long)left >> 20, (long long)limit >> 20);
	}
	return RB_OK;
}
