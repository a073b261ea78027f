/* SPDX-License-Identifier: Apache-2.0 */
/* Ranges of a segment, widened to the pages of kernels with 4 and with 64 KiB. */
#include <stdio.h>

#include "src/internal.h"

static const struct {
	rb_range range;
	uint64_t page, size;
	rb_range want;
} cases[] = {
	{{5000, 10}, 4096, 1 << 20, {4096, 4096}},
	{{5000, 10}, 65536, 1 << 20, {0, 65536}},
	{{65536 + 4096, 65536}, 65536, 1 << 20, {65536, 2 * 65536}},
	{{65536 + 4096, 4096}, 65536, 65536 + 8192, {65536, 8192}}, /* a segment ends inside a page */
};

int main(void)
{
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		rb_range got = rb_whole_pages(cases[i].range, cases[i].page, cases[i].size);
		if (got.offset != cases[i].want.offset || got.bytes != cases[i].want.bytes) {
			printf("case %zu: %llu, %llu bytes\n", i, (unsigned long long)got.offset, (unsigned long long)got.bytes);
			return 1;
		}
	}
	puts("ok");
	return 0;
}
