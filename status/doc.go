// SPDX-License-Identifier: Apache-2.0

// Package status is the one list of named outcomes: how a request ended, why
// a connection was refused, what was wrong with an argument. Numbers and names
// are the same in Go, C, Python, on the wire and in docs/errors.md.
//
//	if errors.Is(err, status.ErrDraining) { … }
//	var code status.Code
//	if errors.As(err, &code) && code.Retryable() { … }
package status
