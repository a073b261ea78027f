/* SPDX-License-Identifier: Apache-2.0 */
/* How many cores a CPU quota is worth, and this process has. */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "src/internal.h"

#define NO_LIMIT UINT32_MAX

static const struct {
	const char *cpu_max;
	uint32_t cores;
} quotas[] = {
	{"max 100000\n", NO_LIMIT},
	{"400000 100000\n", 4},
	{"150000 100000\n", 2},
	{"1000 100000\n", 1},
	{"50000 50000", 1},
	{"9223372036854775807 1000", NO_LIMIT},
	{"-1 100000", NO_LIMIT}, /* version 1, without a quota */
	{"100000 0", NO_LIMIT},
	{"100000", NO_LIMIT},
	{"", NO_LIMIT},
	{"cores", NO_LIMIT},
};

int main(void)
{
	for (size_t i = 0; i < sizeof quotas / sizeof *quotas; i++)
		if (rb_quota_cores(quotas[i].cpu_max) != quotas[i].cores) {
			printf("\"%s\": %u, want %u\n", quotas[i].cpu_max, rb_quota_cores(quotas[i].cpu_max), quotas[i].cores);
			return 1;
		}
	cpu_set_t set;
	if (sched_getaffinity(0, sizeof set, &set) || rb_cores() < 1 || rb_cores() > (uint32_t)CPU_COUNT(&set)) {
		printf("%u cores\n", rb_cores());
		return 1;
	}
	puts("ok");
	return 0;
}
