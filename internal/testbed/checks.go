// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Checks are the figures of a suite with their aims, as --json writes them.
type Checks struct{ list []Check }

// Check is a figure and what it must be.
type Check struct {
	Name     string  `json:"name"`
	Measured float64 `json:"measured"`
	Must     string  `json:"must"`
	OK       bool    `json:"ok"`
	Behind   string  `json:"behind"` // the raw figures, in words
}

// Report prints a figure and keeps it. less: the aim is the most that it may be.
func (c *Checks) Report(name, behind string, got, aim float64, less bool) {
	verdict, sign, ok := "reached", "≥", got >= aim
	if less {
		sign, ok = "≤", got <= aim
	}
	if !ok {
		verdict = "MISSED"
	}
	fmt.Printf("%-118s %.2f  (aim %s %.2f: %s)\n", behind, got, sign, aim, verdict)
	c.list = append(c.list, Check{name, got, fmt.Sprintf("%s %g", sign, aim), ok, behind})
}

// Write writes them to a file; no path is fine.
func (c *Checks) Write(path, suite string) error {
	if path == "" {
		return nil
	}
	text, err := json.MarshalIndent(map[string]any{"suite": suite, suite: map[string]any{"checks": c.list}}, "", " ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o644)
}

// Turn has every caller call as fast as it can, and gives calls a second.
func Turn[C ~func(context.Context) error](ctx context.Context, callers []C, d time.Duration) (rate float64, err error) {
	var n atomic.Int64
	var stop atomic.Bool
	failed := make(chan error, len(callers))
	var all sync.WaitGroup
	begin := time.Now()
	for _, call := range callers {
		all.Go(func() {
			for !stop.Load() {
				if err := call(ctx); err != nil {
					failed <- err
					return
				}
				n.Add(1)
			}
		})
	}
	select {
	case <-time.After(d):
	case err = <-failed:
	case <-ctx.Done():
		err = ctx.Err()
	}
	stop.Store(true)
	all.Wait()
	return float64(n.Load()) / time.Since(begin).Seconds(), err
}

// Median is of at least one number.
func Median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return v[len(v)/2]
}
