// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/internal/testbed"
)

// A recording takes as long as its caller asked for. Others are answered
// meanwhile, however many there are; one whose caller has left is over.
func TestRecordingsHoldNobodyUpAndEndWithTheirCallers(t *testing.T) {
	var models []testbed.Model
	for i := range 10 { // more than are answered at a time
		m := theModel
		m.Name = fmt.Sprint("m", i)
		models = append(models, m)
	}
	h := newHost(t, models...)
	a := admin.New(h.socket)
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	var callers sync.WaitGroup
	for _, m := range models {
		callers.Go(func() {
			for ctx.Err() == nil { // the one that looks below may record it just now
				began := time.Now()
				if _, err := a.Trace(ctx, m.Name, time.Minute); err == nil && time.Since(began) < time.Minute {
					t.Errorf("%s: the recording ended while its caller waited", m.Name)
				}
				time.Sleep(time.Millisecond)
			}
		})
	}
	for _, m := range models {
		h.eventually(m.Name+" is recorded", func() error {
			if _, err := a.Trace(t.Context(), m.Name, time.Millisecond); err == nil {
				return fmt.Errorf("nobody records it")
			}
			return nil
		})
	}
	h.stats()
	leave()
	callers.Wait()
	for _, m := range models {
		h.eventually("the recording of "+m.Name+" is over", func() error {
			_, err := a.Trace(t.Context(), m.Name, time.Millisecond)
			return err
		})
	}
	h.settled()
}
