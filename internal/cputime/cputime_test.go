// SPDX-License-Identifier: Apache-2.0

package cputime

import (
	"testing"
	"time"
)

func TestTheMachinesCPUTimeLeavesIdlingOut(t *testing.T) {
	got, err := parseMachine("cpu  100 10 50 9000 800 1 2 7 0 0")
	if err != nil || got != 1700*time.Millisecond {
		t.Errorf("%v, %v; want 1.7s", got, err)
	}
	for _, line := range []string{"", "cpu0 1 2 3 4 5 6 7 8", "cpu 1 2", "cpu a b c d e f g h"} {
		if _, err := parseMachine(line); err == nil {
			t.Errorf("%q was accepted", line)
		}
	}
}
