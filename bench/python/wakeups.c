/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a kernel makes of a burst of wake-ups: processes that sleep on a futex each
 * are woken one after the other by one process, as a worker wakes the producers of
 * a batch, and then work for some microseconds.
 *
 *	cc -O2 -o wakeups bench/python/wakeups.c && ./wakeups [SLEEPERS [MICROSECONDS [BURSTS [WORDS]]]]
 *
 * With WORDS they share so many futexes, and one call wakes all who sleep on one.
 *
 * Prints when the last was woken, when the last began and ended, and when it would
 * have ended if the work was spread evenly over the cores from the first moment on.
 */
#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MOST 1024

struct sleeper {
	_Alignas(64) _Atomic uint32_t bell; /* +1 for each burst, and at the end; a futex */
	int64_t began, ended;
};

static struct shared {
	struct sleeper sleeper[MOST];
	_Atomic int done;
	_Atomic int stop;
} *s;

static int64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static void wake(struct sleeper *p)
{
	p->bell++;
	syscall(SYS_futex, &p->bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static void sleep_and_work(struct sleeper *p, _Atomic uint32_t *bell, int64_t ns)
{
	for (uint32_t seen = 0;; seen++) {
		while (*bell == seen)
			syscall(SYS_futex, bell, FUTEX_WAIT, seen, NULL, NULL, 0);
		if (s->stop)
			_exit(0);
		p->began = now();
		while ((p->ended = now()) < p->began + ns)
			;
		s->done++;
	}
}

int main(int argc, char **argv)
{
	int sleepers = argc > 1 ? atoi(argv[1]) : 64, us = argc > 2 ? atoi(argv[2]) : 75, bursts = argc > 3 ? atoi(argv[3]) : 200;
	int words = argc > 4 ? atoi(argv[4]) : sleepers;
	int64_t woken = 0, began = 0, ended = 0;
	s = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (s == MAP_FAILED || sleepers < 1 || sleepers > MOST || bursts < 1 || words < 1 || words > sleepers)
		return 2;
	for (int i = 0; i < sleepers; i++) {
		pid_t child = fork();
		if (child < 0) {
			perror("fork");
			kill(0, SIGTERM); /* those that sleep already */
		}
		if (!child)
			sleep_and_work(&s->sleeper[i], &s->sleeper[i % words].bell, us * INT64_C(1000));
	}
	usleep(100000);
	for (int n = 0; n < bursts; n++) {
		s->done = 0;
		int64_t start = now(), last_began = 0, last_ended = 0;
		for (int i = 0; i < words; i++)
			wake(&s->sleeper[i]);
		woken += now() - start;
		while (s->done < sleepers)
			usleep(20);
		for (int i = 0; i < sleepers; i++) {
			last_began = s->sleeper[i].began > last_began ? s->sleeper[i].began : last_began;
			last_ended = s->sleeper[i].ended > last_ended ? s->sleeper[i].ended : last_ended;
		}
		began += last_began - start;
		ended += last_ended - start;
		usleep(n % 7 * 50); /* until all sleep again, and not always in step */
	}
	printf("%d sleepers of %d us each on %d words, means of %d bursts: the last was woken after %.0f us, began after %.0f and ended after %.0f; evenly spread: %.0f\n",
	       sleepers, us, words, bursts, woken / 1e3 / bursts, began / 1e3 / bursts, ended / 1e3 / bursts, (double)sleepers * us / sysconf(_SC_NPROCESSORS_ONLN));
	s->stop = 1;
	for (int i = 0; i < words; i++)
		wake(&s->sleeper[i]);
	while (wait(NULL) > 0)
		;
	return 0;
}
