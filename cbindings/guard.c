//go:build cgo

/*
 * The public functions. Each looks at the fork flag before Go is entered: a
 * forked child has none of the Go runtime's threads, and a call that needs
 * one would hang. What they pass on besides their arguments is this thread's
 * buffer for the text of an error.
 */
#include <pthread.h>
#include <signal.h>

#include "_cgo_export.h"
#include "express.h"
#include "internal.h"

static volatile int forked;

/*
 * Each thread's buffer for the text of an error, made at its first call. Not
 * a __thread array: thread-local memory of a library that is loaded late must
 * fit what the C library has left of its reserve, and in a Python process that
 * has imported PyTorch that is less than 2 KiB ("cannot allocate memory in
 * static TLS block").
 */
static __thread char *own_message;
static pthread_key_t message_key;

static char *message(void)
{
	static char nobodys[RBGO_MESSAGE_BYTES]; /* where there is no memory for one's own */
	if (!own_message) {
		own_message = calloc(1, RBGO_MESSAGE_BYTES);
		if (!own_message)
			return nobodys;
		pthread_setspecific(message_key, own_message); /* freed with the thread */
	}
	return own_message;
}

/* Destructors of other keys may come after this one, and call us again. */
static void forget(void *text)
{
	own_message = NULL;
	free(text);
}

static void in_child(void) { forked = 1; }

/*
 * The Go runtime's own threads have the signal mask that it finds when it is
 * loaded. They must not take signals that the program blocks in all of its
 * threads later, to read them with sigwait or from a signalfd: there they
 * would have their default effect. So what Go does not need itself is blocked
 * while its constructor runs, which is after block and before start.
 */
static sigset_t programs_own;

__attribute__((constructor(101))) static void block(void)
{
	static const int gos[] = {SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGPIPE, SIGPROF, SIGSEGV, SIGSYS, SIGTRAP, SIGURG};
	sigset_t others;
	sigfillset(&others);
	for (size_t i = 0; i < sizeof gos / sizeof *gos; i++)
		sigdelset(&others, gos[i]);
	pthread_sigmask(SIG_BLOCK, &others, &programs_own);
}

__attribute__((constructor)) static void start(void)
{
	pthread_sigmask(SIG_SETMASK, &programs_own, NULL);
	pthread_key_create(&message_key, forget);
	pthread_atfork(NULL, NULL, in_child);
}

/*
 * A handler that interrupts a thread in Go would run on a stack of Go's, which
 * is small, and write over what lies below. With SA_ONSTACK it has one of its
 * own. Go sees to the handlers that are there when it is loaded, this to those
 * that came since.
 */
static void keep_handlers_off_go_stacks(void)
{
	for (int n = 1; n < NSIG; n++) {
		struct sigaction a;
		if (sigaction(n, NULL, &a) || a.sa_handler == SIG_DFL || a.sa_handler == SIG_IGN || a.sa_flags & SA_ONSTACK)
			continue;
		a.sa_flags |= SA_ONSTACK;
		sigaction(n, &a, NULL);
	}
}

static int refuse(void)
{
	strcpy(message(), "this process was forked after its parent had loaded the ringbatch library: "
			"connect in processes that are started afresh, or load it in the child only");
	return RB_ERR_FORKED;
}

static int missing(void)
{
	strcpy(message(), "invalid value: a pointer that this function needs is NULL");
	return RB_ERR_INVALID;
}

#define GUARDED(call) (forked ? refuse() : (call))
/* With what the call writes to or reads from: in Go a NULL would end the process. */
#define GIVEN(pointers, call) GUARDED((pointers) ? (call) : missing())

const char *rb_error(void) { return message(); }
int rb_abi_version(void) { return RB_ABI_VERSION; }
void rb_free(char *string) { free(string); }

int rb_connect(const char *model, const rb_connect_options *o, rb_client *c)
{
	return GIVEN(model && c, (keep_handlers_off_go_stacks(), rbgo_connect((char *)model, (rb_connect_options *)o, c, message())));
}

int rb_close(rb_client c) { return GUARDED(rbgo_close(c, message())); }
int rb_client_model(rb_client c, rb_model *m) { return GIVEN(m, rbgo_client_model(c, m, message())); }
int rb_client_map(rb_client c, rb_map *m) { return GIVEN(m, rbgo_client_map(c, m, message())); }
int rb_map_release(uint64_t map) { return GUARDED(rbgo_map_release(map, message())); }

int rb_client_tensor(rb_client c, int side, uint32_t k, rb_tensor *t)
{
	return GIVEN(t, rbgo_client_tensor(c, side, k, t, message()));
}

int rb_claim(rb_client c, uint32_t rows, const uint32_t *dims, uint32_t ndims, int64_t timeout, rb_request *r)
{
	return GIVEN(r && (dims || !ndims), rbgo_claim(c, rows, (uint32_t *)dims, ndims, timeout, r, message()));
}

int rb_input(rb_client c, uint64_t r, uint32_t k, rb_view *v) { return GIVEN(v, rbgo_view(c, r, RB_INPUT, k, v, message())); }
int rb_output(rb_client c, uint64_t r, uint32_t k, rb_view *v) { return GIVEN(v, rbgo_view(c, r, RB_OUTPUT, k, v, message())); }

int rb_output_row(rb_client c, uint64_t r, uint32_t k, uint32_t row, rb_view *v)
{
	return GIVEN(v, rbgo_output_row(c, r, k, row, v, message()));
}

int rb_set_priority(rb_client c, uint64_t r, uint32_t level) { return GUARDED(rbgo_set_priority(c, r, level, message())); }

int rb_commit(rb_client c, uint64_t r, int64_t timeout, uint32_t flags)
{
	return GUARDED(rbgo_commit(c, r, timeout, flags, message()));
}

int rb_commit_all(rb_client c, const uint64_t *r, uint32_t count, int64_t timeout, uint32_t flags)
{
	return GIVEN(r || !count, rbgo_commit_all(c, (uint64_t *)r, count, timeout, flags, message()));
}

int rb_wait(rb_client c, uint64_t r, int64_t timeout) { return GUARDED(rbgo_wait(c, r, timeout, message())); }
int rb_poll(rb_client c, uint64_t r) { return GUARDED(rbgo_poll(c, r, message())); }
int rb_cancel(rb_client c, uint64_t r) { return GUARDED(rbgo_cancel(c, r, message())); }
int rb_release(rb_client c, uint64_t r) { return GUARDED(rbgo_release(c, r, message())); }
int rb_request_map(rb_client c, uint64_t r, rb_map *m) { return GIVEN(m, rbgo_request_map(c, r, m, message())); }
int rb_request_timing(rb_client c, uint64_t r, rb_timing *t) { return GIVEN(t, rbgo_request_timing(c, r, t, message())); }

int rb_infer(rb_client c, uint32_t rows, const void *const *in, void *const *out, int64_t timeout, int64_t slice, uint64_t *r)
{
	int status;
	if (rows == 1 && !forked && r && rb_express_infer(c, in, out, timeout, slice, r, message(), &status))
		return status;
	return GIVEN(r, rbgo_infer(c, rows, (void **)in, (void **)out, timeout, slice, r, message()));
}

int rb_submit(rb_client c, uint32_t rows, const void *const *in, int64_t timeout, uint32_t flags, uint64_t *r)
{
	return GIVEN(r, rbgo_submit(c, rows, (void **)in, timeout, flags, r, message()));
}

int rb_collect(rb_client c, uint64_t r, void *const *out) { return GUARDED(rbgo_collect(c, r, (void **)out, message())); }

_Static_assert(sizeof(rb_inference) == 56, "other languages know it word by word");
int rb_infer_prepared(rb_inference *i) { return GIVEN(i, rb_infer(i->client, i->rows, i->inputs, i->outputs, i->timeout, i->slice, &i->request)); }
int rb_submit_prepared(rb_inference *i) { return GIVEN(i, rb_submit(i->client, i->rows, i->inputs, i->timeout, i->flags, &i->request)); }
int rb_collect_prepared(const rb_inference *i) { return GIVEN(i, rb_collect(i->client, i->request, i->outputs)); }

int rb_client_fd(rb_client c, int *fd) { return GIVEN(fd, rbgo_client_fd(c, fd, message())); }

int rb_reap(rb_client c, uint64_t *r, uint32_t max, uint32_t *count)
{
	return GIVEN(count && (r || !max), rbgo_reap(c, r, max, count, message()));
}

int rb_worker_attach(const char *model, const char *signature, const rb_worker_options *o, rb_worker *w)
{
	return GIVEN(model && signature && w, (keep_handlers_off_go_stacks(), rbgo_worker_attach((char *)model, (char *)signature, (rb_worker_options *)o, w, message())));
}

int rb_worker_close(rb_worker w) { return GUARDED(rbgo_worker_close(w, message())); }
int rb_worker_notes(rb_worker w, const char **text) { return GIVEN(text, rbgo_worker_notes(w, (char **)text, message())); }
int rb_worker_model(rb_worker w, rb_model *m) { return GIVEN(m, rbgo_worker_model(w, m, message())); }
int rb_worker_map(rb_worker w, rb_map *m) { return GIVEN(m, rbgo_worker_map(w, m, message())); }

int rb_worker_tensor(rb_worker w, int side, uint32_t k, rb_tensor *t)
{
	return GIVEN(t, rbgo_worker_tensor(w, side, k, t, message()));
}

int rb_worker_next(rb_worker w, int64_t timeout, rb_batch **b) { return GIVEN(b, rbgo_worker_next(w, timeout, b, message())); }

int rb_batch_run(const rb_batch *b, int side, uint32_t k, uint32_t i, rb_view *v)
{
	return GIVEN(b && v, rbgo_batch_run((rb_batch *)b, side, k, i, v, message()));
}

int rb_batch_row(const rb_batch *b, int side, uint32_t k, uint32_t i, void **data, uint64_t *bytes)
{
	return GIVEN(b && data && bytes, rbgo_batch_row((rb_batch *)b, side, k, i, data, bytes, message()));
}

int rb_batch_shape(const rb_batch *b, uint32_t i, uint32_t k, uint64_t shape[RB_MAX_RANK])
{
	return GIVEN(b && shape, rbgo_batch_shape((rb_batch *)b, i, k, shape, message()));
}

int rb_batch_set_output_dims(rb_batch *b, uint32_t i, const uint32_t *dims, uint32_t ndims)
{
	return GIVEN(b && (dims || !ndims), rbgo_batch_set_output_dims(b, i, (uint32_t *)dims, ndims, message()));
}

int rb_batch_set_row_dims(rb_batch *b, uint32_t row, const uint32_t *dims, uint32_t ndims)
{
	return GIVEN(b && (dims || !ndims), rbgo_batch_set_row_dims(b, row, (uint32_t *)dims, ndims, message()));
}

int rb_batch_fail(rb_batch *b, uint32_t i, const char *text) { return GIVEN(b, rbgo_batch_fail(b, i, (char *)text, message())); }
int rb_batch_fail_all(rb_batch *b, const char *text) { return GIVEN(b, rbgo_batch_fail_all(b, (char *)text, message())); }
int rb_batch_complete(rb_batch *b) { return GIVEN(b, rbgo_batch_complete(b, message())); }

int rb_stats(const char *socket, int64_t timeout, char **json)
{
	return GIVEN(json, rbgo_stats((char *)socket, timeout, json, message()));
}
