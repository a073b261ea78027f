// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"strings"
	"testing"
)

func TestARelaysZerosAreRefused(t *testing.T) {
	for _, flag := range []string{"--in-flight=0", "--attempts=0", "--check-interval=0", "--check-timeout=0s"} {
		err := runRelay(t.Context(), []string{"model", "--to", "127.0.0.1:8001", flag})
		if name, _, _ := strings.Cut(flag, "="); !errors.Is(err, errUsage) || !strings.Contains(err.Error(), name+" must be more than 0") {
			t.Errorf("%s: %v", flag, err)
		}
	}
}
