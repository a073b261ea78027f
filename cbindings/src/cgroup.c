/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The memory and the cores that the control groups leave this process. Both versions
 * are read, also side by side. A limit binds everything below it, so every group from
 * the process's own up to the mounted root counts.
 */
#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

#include "internal.h"

#define UNLIMITED (INT64_MAX - (1 << 20)) /* version 1 writes about this for no limit */

typedef struct {
	const char *limits[2]; /* files; the lowest counts */
	const char *used;
	const char *idle[2]; /* lines of memory.stat: memory that the kernel frees on demand */
} version;

static const version version1 = {{"memory.limit_in_bytes"}, "memory.usage_in_bytes", {"total_inactive_file", "total_active_file"}};
/* Above memory.high processes are slowed down, not killed. */
static const version version2 = {{"memory.max", "memory.high"}, "memory.current", {"inactive_file", "active_file"}};

static FILE *open_in(const char *folder, const char *name)
{
	char path[PATH_MAX + 64];
	return snprintf(path, sizeof path, "%s/%s", folder, name) < (int)sizeof path ? fopen(path, "re") : NULL;
}

static bool read_number(const char *folder, const char *name, int64_t *n)
{
	FILE *f = open_in(folder, name);
	long long value;
	bool found = f && fscanf(f, "%lld", &value) == 1; /* "max" is no number */
	if (f)
		fclose(f);
	if (found)
		*n = value;
	return found;
}

/* Reads one group's files; false if it has no limit. */
static bool room(const version *v, const char *folder, int64_t *left, int64_t *limit)
{
	int64_t n, used;
	*limit = UNLIMITED;
	for (int i = 0; i < 2; i++)
		if (v->limits[i] && read_number(folder, v->limits[i], &n))
			*limit = rb_min(*limit, n);
	if (*limit >= UNLIMITED || !read_number(folder, v->used, &used))
		return false;
	FILE *f = open_in(folder, "memory.stat");
	char line[256], name[128];
	long long value;
	while (f && fgets(line, sizeof line, f))
		if (sscanf(line, "%127s %lld", name, &value) == 2 && (!strcmp(name, v->idle[0]) || !strcmp(name, v->idle[1])))
			used -= value;
	if (f)
		fclose(f);
	*left = rb_max(0, *limit - rb_max(0, used));
	return true;
}

static bool listed(const char *list, const char *name)
{
	size_t n = strlen(name);
	for (const char *at = list; (at = strstr(at, name)); at += n)
		if ((at == list || at[-1] == ',') && (at[n] == 0 || at[n] == ','))
			return true;
	return false;
}

/* The path of this process's group in a hierarchy, as /proc/self/cgroup has it. */
static bool own_group(bool unified, const char *controller, char *path, size_t size)
{
	FILE *f = fopen("/proc/self/cgroup", "re");
	char line[PATH_MAX + 256];
	bool found = false;
	while (f && !found && fgets(line, sizeof line, f)) { /* hierarchy:controllers:path */
		char *controllers = strchr(line, ':'), *at = controllers ? strchr(controllers + 1, ':') : NULL;
		if (!at)
			continue;
		*controllers++ = *at++ = 0;
		at[strcspn(at, "\n")] = 0;
		found = unified ? !strcmp(line, "0") && !*controllers : listed(controllers, controller);
		if (found)
			found = snprintf(path, size, "%s", at) < (int)size;
	}
	if (f)
		fclose(f);
	return found;
}

/* Turns \040 into a blank, the one character that matters in a path. */
static void unescape(char *s)
{
	for (char *at; (at = strstr(s, "\\040")); s = at + 1) {
		*at = ' ';
		memmove(at + 1, at + 4, strlen(at + 4) + 1);
	}
}

/* A group that limits this process: of version 2 (unified) or 1. */
typedef void visit(void *to, bool unified, const char *folder);

/* Visits every group of this process, and those above, in hierarchies that may have the controller. */
static void each_group(const char *controller, visit *see, void *to)
{
	FILE *f = fopen("/proc/self/mountinfo", "re");
	char *line = NULL;
	size_t length = 0;
	while (f && getline(&line, &length, f) > 0) {
		/* 36 35 98:0 /root /point rw,noatime master:1 - cgroup cgroup rw,memory */
		char root[PATH_MAX], point[PATH_MAX], kind[64], options[512], path[PATH_MAX], folder[2 * PATH_MAX];
		char *dash = strstr(line, " - ");
		if (!dash || sscanf(line, "%*s %*s %*s %4095s %4095s", root, point) != 2 || sscanf(dash + 3, "%63s %*s %511s", kind, options) != 2)
			continue;
		bool unified = !strcmp(kind, "cgroup2");
		if (!(unified || (!strcmp(kind, "cgroup") && listed(options, controller))) || !own_group(unified, controller, path, sizeof path))
			continue;
		unescape(root);
		unescape(point);
		/* In a container the process's own group is the mounted root. */
		size_t above = strlen(root) - (root[strlen(root) - 1] == '/');
		const char *below = strncmp(path, root, above) ? path : path + above;
		if (!strncmp(below, "/..", 3)) /* the process was moved out of the mounted tree */
			below = "";
		snprintf(folder, sizeof folder, "%s%s", point, below);
		for (size_t n = strlen(folder); n > 1 && folder[n - 1] == '/'; n--)
			folder[n - 1] = 0;
		for (;;) {
			see(to, unified, folder);
			char *slash = strrchr(folder, '/');
			if (strlen(folder) <= strlen(point) || !slash)
				break;
			*slash = 0;
		}
	}
	free(line);
	if (f)
		fclose(f);
}

/* ---- memory --------------------------------------------------------------------- */

typedef struct {
	bool limited;
	int64_t *left, *limit;
	char *group;
	size_t size;
} tightest;

static void see_room(void *to, bool unified, const char *folder)
{
	tightest *t = to;
	int64_t left, limit;
	if (!room(unified ? &version2 : &version1, folder, &left, &limit) || (t->limited && left >= *t->left))
		return;
	*t->left = left;
	*t->limit = limit;
	snprintf(t->group, t->size, "%s", folder);
	t->limited = true;
}

bool rb_cgroup_room(int64_t *left, int64_t *limit, char *group, size_t size)
{
	tightest t = {.left = left, .limit = limit, .group = group, .size = size};
	each_group("memory", see_room, &t);
	return t.limited;
}

/* ---- cores ---------------------------------------------------------------------- */

uint32_t rb_quota_cores(const char *cpu_max)
{
	long long quota, period;
	if (sscanf(cpu_max, "%lld %lld", &quota, &period) != 2 || quota <= 0 || period <= 0) /* "max 100000"; version 1 has -1 */
		return UINT32_MAX;
	long long cores = quota / period + (quota % period > 0);
	return cores < UINT32_MAX ? (uint32_t)cores : UINT32_MAX;
}

static void see_cores(void *to, bool unified, const char *folder)
{
	uint32_t *least = to;
	char text[64] = "";
	int64_t quota, period;
	FILE *f = unified ? open_in(folder, "cpu.max") : NULL;
	if (f && !fgets(text, sizeof text, f))
		*text = 0;
	if (f)
		fclose(f);
	if (!unified && read_number(folder, "cpu.cfs_quota_us", &quota) && read_number(folder, "cpu.cfs_period_us", &period))
		snprintf(text, sizeof text, "%lld %lld", (long long)quota, (long long)period);
	uint32_t cores = rb_quota_cores(text);
	if (cores < *least)
		*least = cores;
}

/* The cores that this thread may run on. The kernel refuses a set that is too small for its own. */
static uint32_t allowed_cores(void)
{
	for (int most = CPU_SETSIZE; most <= 1 << 20; most *= 2) {
		size_t size = CPU_ALLOC_SIZE(most);
		cpu_set_t *set = CPU_ALLOC(most);
		bool known = set && !sched_getaffinity(0, size, set);
		int n = known ? CPU_COUNT_S(size, set) : 0;
		CPU_FREE(set);
		if (known)
			return (uint32_t)n;
	}
	return 1;
}

uint32_t rb_cores(void)
{
	uint32_t least = allowed_cores();
	each_group("cpu", see_cores, &least);
	return least;
}
