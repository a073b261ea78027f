// SPDX-License-Identifier: Apache-2.0

package status

import (
	"cmp"
	"errors"
	"fmt"
)

// Code is one named outcome. Completion words, control replies and the C ABI use its
// number; Go errors, C constants and Python exceptions have its name.
//
// A Code other than OK is an error; compare with errors.Is.
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

// Name is the name of the status without prefix, as in docs/errors.md.
func (s Code) Name() string {
	if s.Valid() {
		return table[s].name
	}
	return fmt.Sprintf("Status%d", uint8(s))
}

// Error is a text for users. An error that wraps a Code often has more details.
func (s Code) Error() string {
	if s.Valid() {
		return table[s].text
	}
	return fmt.Sprintf("unknown status %d", uint8(s))
}

// Retryable reports whether the request that ended with err may succeed if sent again.
func Retryable(err error) bool { return is(err, retryable) }

// RetryAttach reports whether a client, worker or publisher that could not attach
// because of err may succeed later by itself: a broker or worker starts, or room becomes
// free. Those that were told to wait try again.
func RetryAttach(err error) bool { return is(err, retryAttach) }

func is(err error, f flags) bool {
	var s Code
	return errors.As(err, &s) && s.Valid() && table[s].is&f != 0
}

// Group is the kind of situation in which the status occurs.
func (s Code) Group() Group {
	if s.Valid() {
		return table[s].group
	}
	return ""
}

// Meaning is the comment beside the constant.
func (s Code) Meaning() string {
	if !s.Valid() || s == OK {
		return ""
	}
	return cmp.Or(table[s].meaning, table[s].text)
}
