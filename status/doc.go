// SPDX-License-Identifier: Apache-2.0

// Package status lists the named outcomes of ringbatch: ends of requests, refusals of
// connections, mistakes in arguments. Numbers and names are the same in Go, C, Python,
// on the wire and in docs/errors.md.
//
//	if errors.Is(err, status.ErrDraining) { … }
//	if status.Retryable(err) { … } // the same request may succeed if sent again
package status
