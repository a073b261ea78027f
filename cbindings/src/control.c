/* SPDX-License-Identifier: Apache-2.0 */
/* The broker's socket: its path, a connection, frames, the end of a connection. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "internal.h"

static const char *set(const char *name)
{
	const char *value = getenv(name);
	return value && *value ? value : NULL;
}

static int fallback_folder(char *path, size_t size)
{
	const char *dir = set("TMPDIR");
	return snprintf(path, size, "%s/ringbatch-%u", dir ? dir : "/tmp", (unsigned)getuid());
}

int rb_socket_path(const char *given, char *path, size_t size)
{
	char folder[4096];
	const char *dir = NULL;
	int n;
	if ((given && *given) || (given = set("RINGBATCH_SOCKET")))
		n = snprintf(path, size, "%s", given);
	else if ((dir = set("XDG_RUNTIME_DIR")))
		n = snprintf(path, size, "%s/ringbatch/broker.sock", dir);
	else
		n = fallback_folder(folder, sizeof folder) < (int)sizeof folder ? snprintf(path, size, "%s/broker.sock", folder) : (int)size;
	if (n < 0 || (size_t)n >= size)
		return rb_fail(RB_ERR_NO_BROKER, "%s (the socket's path is longer than %zu bytes)", rb_status_text(RB_ERR_NO_BROKER), size - 1);
	return RB_OK;
}

/* Refuses a socket in a fallback folder of another user: any user can make a folder of that name first, and would
 * receive this user's inputs. A folder that was chosen is trusted. */
static int check_folder(const char *socket)
{
	char folder[4096];
	struct stat st;
	int n = fallback_folder(folder, sizeof folder);
	const char *slash = strrchr(socket, '/');
	if (!slash || slash - socket != n || strncmp(socket, folder, (size_t)n) || lstat(folder, &st))
		return RB_OK;
	if (!S_ISDIR(st.st_mode) || st.st_uid != getuid())
		return rb_explain(RB_ERR_FORBIDDEN, "%s was not made by this user: remove it, or choose another socket", folder);
	return RB_OK;
}

int rb_dial(const char *path, int64_t deadline, int *out)
{
	int status = check_folder(path);
	if (status)
		return status;
	struct sockaddr_un a = {.sun_family = AF_UNIX};
	if (strlen(path) >= sizeof a.sun_path)
		return rb_fail(RB_ERR_NO_BROKER, "%s (socket %s: its path is longer than %zu bytes)", rb_status_text(RB_ERR_NO_BROKER),
			path, sizeof a.sun_path - 1);
	strcpy(a.sun_path, path);
	if (deadline <= rb_now())
		return rb_say(RB_ERR_TIMEOUT);
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), error = errno;
	if (fd >= 0) {
		int64_t left;
		error = EINTR;
		while (error == EINTR && (left = deadline - rb_now()) > 0) {
			/* A listener whose queue is full lets connect wait for that long. */
			left = rb_later(left, MICROSECOND - 1); /* rounded up: 0 would mean no limit */
			struct timeval t = {left / SECOND, left % SECOND / MICROSECOND};
			setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &t, sizeof t);
			error = connect(fd, (struct sockaddr *)&a, sizeof a) ? errno : 0;
		}
		if (!error) {
			*out = fd;
			return RB_OK;
		}
		close(fd);
	}
	switch (error) {
	case EACCES: case EPERM:
		return rb_explain(RB_ERR_FORBIDDEN, "%s: %s", path, strerror(error));
	case EMFILE: case ENFILE: /* not the broker's fault */
		return rb_explain(RB_ERR_NO_DESCRIPTORS, "it is this process that has none: too many open files");
	case EAGAIN: case EINTR:
		return rb_say(RB_ERR_TIMEOUT);
	}
	return rb_fail(RB_ERR_NO_BROKER, "%s (socket %s: %s)", rb_status_text(RB_ERR_NO_BROKER), path, strerror(error));
}

/* ---- frames ------------------------------------------------------------------- */

/* Waits for the socket; 0, ETIMEDOUT or EINTR. */
static int await(int fd, short events, int64_t deadline)
{
	int64_t left = deadline - rb_now();
	struct pollfd p = {.fd = fd, .events = events};
	if (left <= 0)
		return ETIMEDOUT;
	struct timespec t = {left / SECOND, left % SECOND};
	int n = ppoll(&p, 1, &t, NULL);
	return n > 0 ? 0 : n == 0 ? ETIMEDOUT : errno;
}

int rb_await_readable(int fd, int64_t deadline, bool *interrupted)
{
	int error = await(fd, POLLIN, deadline);
	if (error == EINTR && interrupted)
		*interrupted = true;
	return error ? RB_ERR_TIMEOUT : RB_OK;
}

int rb_no_answer(int fd)
{
	struct sockaddr_un a = {0};
	socklen_t length = sizeof a - 1;
	getpeername(fd, (struct sockaddr *)&a, &length);
	return rb_fail(RB_ERR_TIMEOUT, "the broker at %s did not answer: %s", a.sun_path, rb_status_text(RB_ERR_TIMEOUT));
}

/* Sends a whole message. */
static int send_all(int fd, int64_t deadline, struct msghdr *m)
{
	struct iovec *part = m->msg_iov, *end = part + m->msg_iovlen;
	while (part < end) {
		m->msg_iov = part;
		m->msg_iovlen = (size_t)(end - part);
		ssize_t n = sendmsg(fd, m, MSG_NOSIGNAL | MSG_DONTWAIT);
		int error = n < 0 ? errno : 0;
		if (error == EAGAIN)
			error = await(fd, POLLOUT, deadline);
		if (error && error != EINTR)
			return error;
		while (part < end && n >= (ssize_t)part->iov_len)
			n -= (ssize_t)part++->iov_len;
		if (part < end && n > 0) { /* a short write of a stream socket */
			part->iov_base = (uint8_t *)part->iov_base + n;
			part->iov_len -= (size_t)n;
		}
	}
	return 0;
}

int rb_send_frame(int fd, int64_t deadline, const uint8_t *body, size_t bytes)
{
	if (bytes > RB_GO_MAX_FRAME)
		return EMSGSIZE;
	uint8_t head[4] = {(uint8_t)bytes, (uint8_t)(bytes >> 8), (uint8_t)(bytes >> 16), (uint8_t)(bytes >> 24)};
	struct iovec parts[2] = {{head, 4}, {(void *)body, bytes}};
	return send_all(fd, deadline, &(struct msghdr){.msg_iov = parts, .msg_iovlen = 2});
}

int rb_send_offer(int fd, int64_t deadline, int offer)
{
	union {
		char bytes[CMSG_SPACE(sizeof offer)];
		struct cmsghdr aligned;
	} control = {0};
	uint8_t one = 0;
	struct iovec part = {&one, 1};
	struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
	*CMSG_FIRSTHDR(&m) = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof offer)};
	memcpy(CMSG_DATA(CMSG_FIRSTHDR(&m)), &offer, sizeof offer);
	return send_all(fd, deadline, &m);
}

static int broken(const char *why) { return rb_explain(RB_ERR_BROKER_GONE, "%s", why); }

void rb_frame_close_fds(rb_frame *f)
{
	while (f->nfds > 0)
		close(f->fds[--f->nfds]);
}

void rb_frame_free(rb_frame *f)
{
	rb_frame_close_fds(f);
	free(f->body);
	f->body = NULL;
}

/* Takes the descriptors out of a message. */
static int take_fds(struct msghdr *m, rb_frame *f)
{
	for (struct cmsghdr *c = CMSG_FIRSTHDR(m); c; c = CMSG_NXTHDR(m, c)) {
		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		for (size_t i = 0; i < n; i++) {
			int fd;
			memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
			if (f->nfds < RB_MAX_FDS)
				f->fds[f->nfds++] = fd;
			else
				close(fd);
		}
	}
	if (!(m->msg_flags & MSG_CTRUNC))
		return RB_OK;
	if (f->nfds < RB_MAX_FDS) /* the frame had room for them */
		return rb_explain(RB_ERR_NO_DESCRIPTORS, "it is this process that has none: too many open files");
	return rb_explain(RB_ERR_PROTOCOL, "more than %d descriptors", RB_MAX_FDS);
}

/* Reads up to size bytes into to, and the descriptors that come with them. */
static int receive(int fd, int64_t deadline, void *to, size_t size, rb_frame *f, size_t *got)
{
	union {
		char bytes[CMSG_SPACE(RB_MAX_FDS * sizeof(int))];
		struct cmsghdr aligned;
	} control;
	struct iovec part = {to, size};
	for (;;) {
		struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
		ssize_t n = recvmsg(fd, &m, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
		if (n > 0) {
			*got = (size_t)n;
			return take_fds(&m, f);
		}
		int error = n ? errno : 0;
		if (n == 0)
			return broken("the broker hung up");
		if (error == EAGAIN)
			error = await(fd, POLLIN, deadline);
		if (error == ETIMEDOUT)
			return rb_no_answer(fd);
		if (error && error != EINTR)
			return broken(strerror(error));
	}
}

int rb_receive_frame(int fd, int64_t deadline, rb_frame *f)
{
	uint8_t head[4];
	size_t have = 0, got, room = 0;
	memset(f, 0, sizeof *f);
	for (; have < 4; have += got) {
		int status = receive(fd, deadline, head + have, 4 - have, f, &got);
		if (status)
			return status;
	}
	uint32_t size = head[0] | (uint32_t)head[1] << 8 | (uint32_t)head[2] << 16 | (uint32_t)head[3] << 24;
	if (size == 0 || size > RB_GO_MAX_FRAME)
		return rb_explain(RB_ERR_PROTOCOL, "a frame of %u bytes", size);
	for (; f->bytes < size; f->bytes += (uint32_t)got) {
		if (f->bytes == room) { /* grows with the bytes that have arrived */
			room = 4 * room + 4096;
			uint8_t *more = realloc(f->body, room);
			if (!more)
				return rb_say(RB_ERR_NO_MEMORY);
			f->body = more;
		}
		size_t left = size - f->bytes;
		int status = receive(fd, deadline, f->body + f->bytes, left < room - f->bytes ? left : room - f->bytes, f, &got);
		if (status)
			return status;
	}
	return RB_OK;
}

/* ---- the end -------------------------------------------------------------------- */

/* A broker takes less than a millisecond. If it stands still, the close goes on after this. */
#define LEAVE_TIME SECOND

void rb_say_goodbye(int fd, pid_t owner)
{
	struct pollfd p = {.fd = fd, .events = POLLRDHUP};
	int64_t until = rb_now() + LEAVE_TIME, left = LEAVE_TIME;
	if (fd < 0 || getpid() != owner || shutdown(fd, SHUT_WR))
		return;
	while (poll(&p, 1, (int)(left / MILLISECOND)) < 0 && errno == EINTR && (left = until - rb_now()) > 0)
		;
}

void rb_hang_up(int fd, pid_t owner)
{
	if (getpid() == owner)
		shutdown(fd, SHUT_RDWR);
	close(fd);
}

void rb_close_fd(_Atomic int *fd)
{
	/* Forget the number before it is closed: another thread may get it at once. */
	int old = atomic_exchange(fd, -1);
	if (old >= 0)
		close(old);
}
