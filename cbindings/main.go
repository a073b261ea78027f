// Command cbindings is the C library of ringbatch:
//
//	go build -buildmode=c-shared -o libringbatch.so ./cbindings
//
// ringbatch.h, written by hand, is its contract. From the outside in:
//
//	ringbatch.h   what callers see
//	guard.c       the public rb_ functions: look at the fork flag, then enter Go
//	express.c     whole requests without entering Go, through a slot that the client lends
//	express.go    the lending
//	status.c      names of the statuses, for callers that cannot enter Go
//	client.go     connecting
//	request.go    the life of a request, step by step
//	infer.go      whole requests in one call
//	worker.go     attaching, and taking batches
//	batch.go      batches
//	handles.go    numbers for Go values, with no lock on the way in
//	errors.go     Go errors into statuses and texts
//	structs.go    Go descriptions into C structs
//
// Every exported function runs on its caller's thread, and waits there too.
package main

import "C"

func main() {}
