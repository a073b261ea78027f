// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/testbed"
)

func TestAProcessWithLittleToDoHasFewPsUntilItEnds(t *testing.T) {
	t.Setenv("GOMAXPROCS", "")
	const all = 4 * leastProcs
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(all))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { fitProcs(ctx); close(ended) }()
	if err := testbed.Eventually(time.Minute, func() error {
		if runtime.GOMAXPROCS(0) == all {
			return errors.New("it has all of them")
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
	cancel()
	<-ended
	if n := runtime.GOMAXPROCS(0); n != all {
		t.Errorf("it leaves %d Ps behind, want %d", n, all)
	}
}

func TestAProcessHasAsManyPsAsItKeepsBusyAndOneMore(t *testing.T) {
	p := procs{most: 16, now: leastProcs}
	for _, c := range []struct {
		cores float64
		ticks int
		want  int
	}{
		{0, 3, 2},
		{0.5, 3, 2},
		{2, 1, 4}, // all that it has
		{4, 1, 6},
		{6, 1, 9},
		{9, 1, 13},
		{13, 1, 16}, // no more than there are
		{16, 5, 16},
		{2.2, calmTicks - 1, 16}, // a pause is not the end
		{16, 1, 16},
		{2.2, calmTicks - 1, 16},
		{0.1, 1, 4}, // as many as were needed while it was calm
		{0.1, calmTicks, 2},
	} {
		for range c.ticks {
			p.busy(c.cores)
		}
		if p.now != c.want {
			t.Errorf("after %d ticks with %.1f cores busy: %d Ps, want %d", c.ticks, c.cores, p.now, c.want)
		}
	}
}
