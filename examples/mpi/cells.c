/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranks of a reaction and diffusion: a rank has 64 cells in a row, and the reaction of all
 * cells in a time step is one request to the surrogate of surrogate.py. job.sh runs it.
 *
 *   mpicc -O2 -DUSE_MPI -o cells cells.c $(pkg-config --cflags --libs ringbatch)
 *   mpirun -n 8 ./cells 200
 *
 * Without -DUSE_MPI each process is a world of its own. A rank holds no network, no CUDA
 * context and no thread of the library.
 */
#include <math.h>
#include <ringbatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifdef USE_MPI
#include <mpi.h>
#endif

enum { CELLS = 64, PARTS = 50 };
static const int64_t MOST = 60000000000; /* no wait without an end: a job that hangs costs its allocation */
static const double STEP = 0.05;

static void fail(const char *what)
{
	fprintf(stderr, "%s: %s\n", what, rb_error());
#ifdef USE_MPI
	MPI_Abort(MPI_COMM_WORLD, 1);
#endif
	exit(1);
}

static double seconds(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void rates(const double x[2], const double by[2], double h, double out[2])
{
	double u = x[0] + h * by[0], v = x[1] + h * by[1];
	out[0] = 1 + u * u * v - 4 * u, out[1] = 3 * u - u * u * v;
}

/* The reaction that the surrogate learned, by Runge and Kutta's method. */
static void exact(const float x[2], double change[2])
{
	double h = STEP / PARTS, now[2] = {x[0], x[1]}, none[2] = {0, 0}, k[4][2];
	for (int i = 0; i < PARTS; i++) {
		rates(now, none, 0, k[0]), rates(now, k[0], h / 2, k[1]), rates(now, k[1], h / 2, k[2]), rates(now, k[2], h, k[3]);
		for (int j = 0; j < 2; j++)
			now[j] += h / 6 * (k[0][j] + 2 * k[1][j] + 2 * k[2][j] + k[3][j]);
	}
	change[0] = now[0] - x[0], change[1] = now[1] - x[1];
}

/* The neighbours' outer cells come to x[0] and x[CELLS + 1]. */
static void exchange(float x[CELLS + 2][2], int rank, int ranks)
{
#ifdef USE_MPI
	int left = (rank + ranks - 1) % ranks, right = (rank + 1) % ranks;
	MPI_Sendrecv(x[1], 2, MPI_FLOAT, left, 0, x[CELLS + 1], 2, MPI_FLOAT, right, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
	MPI_Sendrecv(x[CELLS], 2, MPI_FLOAT, right, 1, x[0], 2, MPI_FLOAT, left, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
#else
	(void)rank, (void)ranks;
	memcpy(x[0], x[CELLS], sizeof x[0]);
	memcpy(x[CELLS + 1], x[1], sizeof x[0]);
#endif
}

int main(int argc, char **argv)
{
	int rank = 0, ranks = 1, steps = argc > 1 ? atoi(argv[1]) : 200;
#ifdef USE_MPI
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
#endif
	/* A row for each cell. Threads that call at once need a window of as many rows more. */
	rb_connect_options options = {.size = sizeof options, .window = CELLS, .wait = 1, .patience = MOST};
	rb_client surrogate;
	if (rb_connect("mlp", &options, &surrogate) != RB_OK)
		fail("the surrogate");
	float x[CELLS + 2][2], y[CELLS][2];
	for (int i = 1; i <= CELLS; i++)
		x[i][0] = 1 + 0.5f * sinf(0.1f * (rank * CELLS + i)), x[i][1] = 3;
	double error = 0, asked = 0;
	for (int step = 0; step < steps; step++) {
		const void *in[] = {x[1]};
		void *out[] = {y};
		uint64_t bytes[] = {sizeof y}, request;
		double began = seconds();
		if (rb_infer(surrogate, CELLS, in, bytes, out, bytes, 0, MOST, &request) != RB_OK)
			fail("no answer");
		asked += seconds() - began;
		for (int i = 0; i < CELLS; i++) {
			double change[2];
			exact(x[1 + i], change);
			error += fabs(y[i][0] - change[0]) + fabs(y[i][1] - change[1]);
		}
		for (int i = 0; i < CELLS; i++)
			x[1 + i][0] += y[i][0], x[1 + i][1] += y[i][1];
		exchange(x, rank, ranks);
		for (int j = 0; j < 2; j++)
			for (int i = 1; i <= CELLS; i++)
				y[i - 1][j] = x[i][j] + 0.1f * (x[i - 1][j] - 2 * x[i][j] + x[i + 1][j]);
		memcpy(x[1], y, sizeof y);
	}
	rb_close(surrogate);
	double sums[] = {error / (2.0 * steps * CELLS), asked};
#ifdef USE_MPI
	MPI_Allreduce(MPI_IN_PLACE, sums, 2, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
	MPI_Finalize();
#endif
	if (rank == 0)
		printf("ranks %d  steps %d  mean error %.1e  a step waits %.2f ms\n", ranks, steps, sums[0] / ranks, 1e3 * sums[1] / ranks / steps);
	return 0;
}
