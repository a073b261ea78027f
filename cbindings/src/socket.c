/* SPDX-License-Identifier: Apache-2.0 */
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
