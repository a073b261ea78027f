// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
)

func TestTheStatusesOfEveryLanguageAreThoseOfTheTable(t *testing.T) {
	err := generate("../..", func(path string, _ []byte, _ os.FileMode) error {
		t.Errorf("%s is not up to date: run  go generate ./status", path)
		return nil
	})
	must.Do(t, err)
}

func TestEveryStatusHasAShortRemedy(t *testing.T) {
	for _, s := range status.All()[1:] {
		if words := len(strings.Fields(remedies[s.Name()])); words == 0 || words > 12 {
			t.Errorf("%s has a remedy of %d words, want 1 to 12", s.Name(), words)
		}
	}
	if len(remedies) != len(status.All())-1 {
		t.Errorf("%d remedies for %d statuses", len(remedies), len(status.All())-1)
	}
}
