// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand"
	"sync"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/testbed"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/worker"
)

// Five models on three loops, all busy at once, in memory that the race
// detector sees: a loop that touched another's ring would be a race. Every
// answer is computed here too, so that one of another model would be wrong.
func TestLoopsServeTheirModelsWithoutTouchingOneAnothers(t *testing.T) {
	var models []testbed.Model
	for i := range 5 {
		models = append(models, testbed.Model{Name: fmt.Sprint("m", i), Slots: 64, MaxBatch: 1 + 3*i, Wait: time.Duration(i) * 200 * time.Microsecond, Lease: lease, Width: 4 + i})
	}
	r := onLoops(t, shm.NewHeap(), 3, models...)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var wg sync.WaitGroup
	for i, m := range models {
		cfg := m.WorkerConfig(r.socket)
		cfg.Memory, cfg.Depth = r.mem, 1+i%2
		r.wg.Add(1)
		serving, stop := context.WithCancel(context.Background())
		t.Cleanup(stop)
		go func() {
			defer r.wg.Done()
			if err := worker.Serve(serving, cfg, obey); err != nil && !errors.Is(err, context.Canceled) {
				t.Errorf("worker of %s: %v", m.Name, err)
			}
		}()
		for k := range 2 {
			wg.Add(1)
			go func() {
				defer wg.Done()
				rng := rand.New(rand.NewSource(int64(10*i + k)))
				for range 3 { // clients come and go beside the others' requests
					c, err := client.Dial(ctx, m.Name, client.WithSocket(r.socket), client.WithMemory(r.mem), client.WithWindow(1+rng.Intn(8)))
					if err != nil {
						t.Error(err)
						return
					}
					for range 40 {
						x := make([]int64, m.Width)
						for j := range x {
							x[j] = 1000 + rng.Int63n(1<<40) // no command
						}
						if err := testbed.Ask(ctx, c, x, m.Width); err != nil {
							t.Errorf("%s: %v", m.Name, err)
						}
					}
					c.Close()
				}
			}()
		}
	}
	wg.Wait()
	for _, m := range models {
		r.eventually("the broker has heard of every end", func() error { // workers answer first, and tell it then
			if st := r.model(m.Name); st.Requests != 240 || st.Ended["OK"] != 240 {
				return fmt.Errorf("%s counts %d requests, ended %v", m.Name, st.Requests, st.Ended)
			}
			return nil
		})
	}
}
