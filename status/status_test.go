// SPDX-License-Identifier: Apache-2.0

package status

import (
	"errors"
	"testing"
)

func TestEveryStatusHasANameAndAText(t *testing.T) {
	seen := map[string]bool{}
	for _, s := range All() {
		if s.Name() == "" || s.Error() == "" || (s != OK && s.Meaning() == "") || seen[s.Name()] || !s.Valid() {
			t.Errorf("status %d: name %q, text %q", s, s.Name(), s.Error())
		}
		seen[s.Name()] = true
	}
	if s := Code(200); s.Valid() || s.Name() == "" || s.Error() == "" {
		t.Error("an unknown status has no text")
	}
	if !errors.Is(error(ErrFull), ErrFull) || !Retryable(ErrFull) || Retryable(ErrShape) || Retryable(nil) {
		t.Error("a status does not compare as an error")
	}
}

func TestAttachingIsTriedAgainOnlyAfterErrorsThatPass(t *testing.T) {
	for _, s := range []Code{ErrVersion, ErrLayout, ErrSignatureMismatch, ErrForbidden, ErrInvalid, Code(200)} {
		if RetryAttach(s) {
			t.Errorf("a peer would try for ever after %s", s.Name())
		}
	}
	for _, s := range []Code{ErrNoBroker, ErrBrokerGone, ErrDraining, ErrTooManyConnections, ErrNoDescriptors, ErrTimeout,
		ErrRingFull, ErrUnknownModel, ErrNoWorker} {
		if !RetryAttach(s) {
			t.Errorf("a peer would give up too early after %s", s.Name())
		}
	}
}
