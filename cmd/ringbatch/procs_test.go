// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"io"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/test/testbed"
)

func TestAProcessWithLittleToDoHasFewPsUntilItEnds(t *testing.T) {
	if _, err := os.Stat("/proc/self/io"); err != nil {
		t.Skip("this kernel does not count it")
	}
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
		cores, bytes float64
		ticks        int
		want         int
	}{
		{0, 0, 3, 4},
		{2, 100, 3, 4},
		{4, 100, 1, 6}, // all that it has
		{6, 100, 1, 9},
		{9, 100, 1, 13},
		{13, 100, 1, 16}, // no more than there are
		{16, 100, 5, 16},
		{4.2, 100, calmTicks - 1, 16}, // a pause is not the end
		{16, 100, 1, 16},
		{4.2, 100, calmTicks - 1, 16},
		{0.1, 100, 1, 7}, // as many as were needed while it was calm
		{0.1, 100, calmTicks, 4},
		{0.1, 100_000, 1, 16}, // large bodies need all
		{0.1, 100, calmTicks - 1, 16},
		{0.1, 100, 1, 4},
	} {
		for range c.ticks {
			p.adjust(c.cores, c.bytes)
		}
		if p.now != c.want {
			t.Errorf("after %d ticks with %.1f cores busy and %.0f bytes a call: %d Ps, want %d", c.ticks, c.cores, c.bytes, p.now, c.want)
		}
	}
}

func TestWhatAProcessReadsAndHowMuchAtOnceIsCounted(t *testing.T) {
	moved, err := os.Open("/proc/self/io")
	if err != nil {
		t.Skip("this kernel does not count it")
	}
	defer moved.Close()
	zero, err := os.Open("/dev/zero")
	must.Do(t, err)
	defer zero.Close()
	const large = 16 << 20 // more than other tests read at once
	before := readSpent(moved)
	if _, err := io.ReadFull(zero, make([]byte, large)); err != nil {
		t.Fatal(err)
	}
	after := readSpent(moved)
	if read := after.bytes - before.bytes; read < large || after.calls <= before.calls {
		t.Errorf("%d bytes in %d calls; at least %d were read", read, after.calls-before.calls, large)
	}
}
