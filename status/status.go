// SPDX-License-Identifier: Apache-2.0

package status

import "fmt"

// Code is one named outcome. The same numbers travel in completion words, in
// control replies and through the C ABI, and the same names are the Go errors,
// the C constants and the Python exceptions.
//
// A Code other than OK is an error; callers compare with errors.Is.
type Code uint8

// All lists every status, for bindings and documentation.
func All() []Code {
	all := make([]Code, count)
	for i := range all {
		all[i] = Code(i)
	}
	return all
}

// Valid reports whether s is a status of this version.
func (s Code) Valid() bool { return s < count }

// Name is the status's name without prefix, as in docs/errors.md.
func (s Code) Name() string {
	if s.Valid() {
		return table[s].name
	}
	return fmt.Sprintf("Status%d", uint8(s))
}

// Error is the general text for users. An error that wraps a Code often says
// more.
func (s Code) Error() string {
	if s.Valid() {
		return table[s].text
	}
	return fmt.Sprintf("unknown status %d", uint8(s))
}

// Retryable reports whether the same request may succeed if sent again.
func (s Code) Retryable() bool { return s.is(retryable) }

// RetryAttach reports whether a worker whose attempt to attach ended with s
// should try again: nobody has to change anything for it to succeed later.
func (s Code) RetryAttach() bool { return s.is(retryAttach) }

func (s Code) is(f flags) bool { return s.Valid() && table[s].is&f != 0 }

// Group says where the status comes up.
func (s Code) Group() Group {
	if s.Valid() {
		return table[s].group
	}
	return ""
}

// Meaning is the comment beside the constant.
func (s Code) Meaning() string {
	if s.Valid() {
		return table[s].meaning
	}
	return ""
}
