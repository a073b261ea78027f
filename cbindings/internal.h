/* What guard.c and the Go files share. */
#ifndef RINGBATCH_INTERNAL_H
#define RINGBATCH_INTERNAL_H

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ringbatch.h"

/* Room for the text of an error, per thread. */
#define RBGO_MESSAGE_BYTES 2048

#endif
