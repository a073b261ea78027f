// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/admin/stats"
)

func TestAGoalBelowOneBatchsOwnTimeIsSaidToBeTooShort(t *testing.T) {
	m := &stats.Model{LatencyGoalMS: 4}
	if s := goalTooShort(m); s != "" {
		t.Errorf("before a batch was seen: %s", s)
	}
	m.Learned.Costs = []stats.LearnedCost{{Rows: 1, MS: 5}, {Rows: 8, MS: 9}}
	if s := goalTooShort(m); !strings.Contains(s, "4ms") || !strings.Contains(s, "5ms") {
		t.Errorf("%q", s)
	}
	m.Learned.Costs = []stats.LearnedCost{{Rows: 1, MS: 5, Batches: 100}, {Rows: 7, MS: 1, Batches: 2}, {Rows: 8, MS: 9, Batches: 50}}
	if s := goalTooShort(m); !strings.Contains(s, "5ms") {
		t.Errorf("a size that was hardly seen counted: %q", s)
	}
	m.LatencyGoalMS = 6
	if s := goalTooShort(m); s != "" {
		t.Errorf("a goal that one batch keeps: %s", s)
	}
}
