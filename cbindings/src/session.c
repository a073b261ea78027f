/* SPDX-License-Identifier: Apache-2.0 */
/* An attached session: whether the broker is still there, and its end. */
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "internal.h"

bool rb_session_judge(rb_session *s, short events)
{
	if (events & POLLIN) /* the byte stays where it is */
		s->again = true;
	return events & ~POLLIN;
}

bool rb_session_gone(rb_session *s)
{
	struct pollfd p = {.fd = s->socket, .events = s->again ? POLLRDHUP : POLLRDHUP | POLLIN};
	return p.fd < 0 || (poll(&p, 1, 0) > 0 && rb_session_judge(s, p.revents));
}

/* The broker leases the slots again as soon as it sees the end: the GPU must have stopped writing to them. */
void rb_session_hang_up(rb_session *s)
{
	rb_device_synchronize(&s->device);
	int fd = atomic_exchange(&s->socket, -1);
	if (fd >= 0)
		rb_hang_up(fd, s->owner);
}

/* A broker takes less than a millisecond. If it stands still, the close goes on after this. */
#define LEAVE_TIME SECOND

void rb_session_leave(rb_session *s)
{
	rb_device_synchronize(&s->device);
	int fd = s->socket;
	if (fd >= 0 && getpid() == s->owner && !shutdown(fd, SHUT_WR)) {
		struct pollfd p = {.fd = fd, .events = POLLRDHUP};
		int64_t until = rb_now() + LEAVE_TIME, left = LEAVE_TIME;
		while (poll(&p, 1, (int)(left / MILLISECOND)) < 0 && errno == EINTR && (left = until - rb_now()) > 0)
			;
	}
	rb_session_hang_up(s);
}

static void free_session(rb_session *s)
{
	rb_layout_free(&s->layout);
	for (int i = 0; i < (int)RB_DIMS; i++) {
		free(s->bucket[i]);
		s->bucket[i] = NULL;
		s->buckets[i] = 0;
	}
	free(s->notes);
	s->notes = NULL;
}

void rb_session_close(rb_session *s)
{
	rb_session_hang_up(s);
	rb_close_fd(&s->doorbell);
	if (s->device.base)
		rb_device_close(&s->device);
	rb_segment_close(&s->planes);
	rb_segment_close(&s->board_segment);
	rb_segment_close(&s->words);
	free_session(s);
}
