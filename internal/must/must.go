// SPDX-License-Identifier: Apache-2.0

// Package must holds a test to errors: a step succeeds, or fails with the expected error.
package must

import (
	"errors"
	"slices"
	"testing"
)

// Do ends the test if a step failed that the test needs.
func Do(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Check fails the test if err is not nil, and the test goes on.
func Check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
}

// Fail fails the test if err is none of the errors in want, and the test goes on.
func Fail(t testing.TB, what string, err error, want ...error) {
	t.Helper()
	if !slices.ContainsFunc(want, func(w error) bool { return errors.Is(err, w) }) {
		t.Errorf("%s: %v, not %v", what, err, want)
	}
}
