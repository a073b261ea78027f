// SPDX-License-Identifier: Apache-2.0

package supervise

import (
	"maps"
	"testing"
)

func TestTheAnswerOfNvidiaSmiIsRead(t *testing.T) {
	got := parseMemory("4711, 6144\n 12 , 10\n4711, 1\n13, [N/A]\n[N/A], 5\n\nNo running processes found\n14, -3\n0, 9\n15\n")
	if want := map[int]int64{4711: 6145 << 20, 12: 10 << 20}; !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
