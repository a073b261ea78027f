/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "reply.h"

#define MAX_STATS (256u << 20)

static int ask_stats(const char *socket, int64_t deadline, char **json)
{
	char path[4096];
	rb_writer w = {0};
	rb_attach a;
	rb_frame f = {0};
	rb_reply p;
	int status = rb_socket_path(socket, path, sizeof path);
	rb_begin_request(&w, 0, "stats", NULL, NULL);
	if (!status)
		status = rb_attach_begin(&a, path, deadline, &w, false, -1);
	free(w.data);
	if (status)
		return status;
	char *text = NULL;
	size_t length = 0;
	do { /* a long reply comes in several frames */
		status = rb_receive_frame(a.fd, rb_min(deadline, a.deadline), &f);
		if (!status)
			status = rb_read_reply(&f, &p);
		if (!status && length + p.stats_bytes > MAX_STATS)
			status = rb_malformed("statistics are too long");
		char *longer = status ? NULL : realloc(text, length + p.stats_bytes + 1);
		if (!status && !longer)
			status = rb_say(RB_ERR_NO_MEMORY);
		if (!status) {
			text = longer;
			if (p.stats_bytes)
				memcpy(text + length, p.stats, p.stats_bytes);
			length += p.stats_bytes;
			text[length] = 0;
		}
		rb_frame_free(&f);
	} while (!status && p.more);
	rb_attach_cancel(&a);
	if (status)
		free(text);
	else
		*json = text;
	return status;
}

int rb_stats(const char *socket, int64_t timeout, char **json)
{
	if (!json)
		return rb_missing();
	int64_t deadline = rb_until(timeout, rb_now());
	int status = ask_stats(socket, deadline, json);
	for (int i = 0; status == RB_ERR_BROKER_GONE && i < RB_SUCCESSORS; i++)
		status = ask_stats(socket, deadline, json);
	return status;
}

void rb_free(char *string) { free(string); }
