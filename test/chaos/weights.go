// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
)

var weightsModel = func() testbed.Model {
	m := theModel
	m.MaxBatch = 64
	return m
}()

var publisherLabels = []string{"half-written", "written", "published", "random", "random"}

var followerLabels = []string{"loading", "taken", "half-written", "random"}

// killWeights kills publishers and workers of live weights. No answer may come from two
// versions, or from one older than a version that was published before the request was
// committed. The versions of a worker never go back.
func killWeights(r *run) {
	if !slices.Contains(r.kinds(), "python") {
		return
	}
	job := r.brokerJob()
	job.Models[0] = weightsModel
	h := r.startHost(job, 0, testbed.Spec{})
	r.must(os.WriteFile(r.bed.Path(publishedFile), make([]byte, 8), 0o600))
	var kills [2]atomic.Int64 // of publishers, of workers
	peer := func(role, label string, most int) *testbed.Process {
		return r.script("weights.py", role, r.socket(), weightsModel.Name, label, strconv.Itoa(r.intn(most)), strconv.Itoa(r.intn(1<<30)),
			r.bed.Path(publishedFile))
	}
	kill := func(kind int, role string, labels []string, most int) (stop func()) {
		var over atomic.Bool
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			r.guard(func() {
				for ok := true; ok && !over.Load() && r.ctx.Err() == nil; kills[kind].Add(1) {
					label := labels[r.intn(len(labels))]
					_, _, ok = r.died(peer(role, label, most), role, label)
				}
			})
		}()
		return func() { over.Store(true); <-ended }
	}
	w := peer("follower", "", 1) // lives
	stops := []func(){kill(0, "publisher", publisherLabels, 100)}
	r.must(w.Expect("attached", nil, enoughTime))
	for range 2 {
		stops = append(stops, kill(1, "follower", followerLabels, 60))
		h.addLoad(r.start(testbed.Spec{Role: "asker", Job: loadJob{Socket: h.socket(), Seed: r.seed(), Load: 64}, Procs: 2}))
	}
	for answers := 0; answers < r.events && r.ctx.Err() == nil; time.Sleep(50 * time.Millisecond) {
		if s, err := h.stats(); err == nil { // a busy machine may answer late
			answers = int(s[0].Ended[status.OK.Name()])
			r.progress(answers)
		}
	}
	for _, stop := range slices.Backward(stops) { // publishers last: a worker may wait for a version to die at
		stop()
	}
	sum := h.endLoads("WorkerDied")
	r.check(sum.OK >= r.events, "only %d answers", sum.OK)
	fmt.Printf("   %d publishers and %d workers killed; version %d was the last\n", kills[0].Load(), kills[1].Load(),
		lastPublished(r.bed.Path(publishedFile)))
	r.check(w.Stop(enoughTime) == nil, "the worker that lives: %s", w.Log())
	h.before.FDs++ // the segment of the weights
	h.before.Maps++
	h.settled()
}

// publishedFile has the latest version whose publication has returned, in 8 bytes.
const publishedFile = "published"

func lastPublished(path string) uint64 {
	b, err := os.ReadFile(path)
	if err != nil || len(b) != 8 {
		return 0
	}
	return binary.NativeEndian.Uint64(b)
}

// playAsker sends requests from several goroutines until SIGTERM, and checks each answer.
func playAsker(child *testbed.Child, job loadJob) error {
	ctx := child.Context()
	dial, cancel := context.WithTimeout(ctx, enoughTime)
	defer cancel()
	c, err := client.Dial(dial, weightsModel.Name, client.WithSocket(job.Socket), client.WithWindow(2*job.Load), client.WaitForModel())
	if err != nil {
		return err
	}
	published, err := os.Open(filepath.Join(filepath.Dir(job.Socket), publishedFile))
	if err != nil {
		return err
	}
	_ = child.Ready()
	var mu sync.Mutex
	t := tally{Named: map[string]int{}}
	stalls := testbed.WatchStalls(nil, false)
	var wg sync.WaitGroup
	for range job.Load {
		wg.Go(func() {
			for ctx.Err() == nil {
				start := time.Now()
				err := askVersion(c, published)
				mu.Lock()
				t.count(err, time.Since(start), patience+stalls.Since(start), status.OK)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	t.Stood = stalls.Since(time.Time{})
	return errors.Join(child.Tell("tally", &t), c.Close())
}

// askVersion checks that an answer comes from one version, and that none newer had been
// published when its request was committed.
func askVersion(c *client.Client, published *os.File) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	req, err := c.Fill(ctx, make([]int64, testbed.Width))
	if err != nil {
		return err
	}
	defer req.Release()
	var floor [8]byte
	if _, err := published.ReadAt(floor[:], 0); err != nil {
		return err
	}
	if err = req.Commit(ctx); err == nil {
		err = req.Wait(ctx)
	}
	if err != nil {
		return err
	}
	view, err := req.Output("y")
	if err != nil {
		return err
	}
	y, err := tensor.As[int64](view)
	if err != nil {
		return err
	}
	v, err := req.Version()
	if err != nil {
		return err
	}
	if oldest := int64(binary.NativeEndian.Uint64(floor[:])); y[0] != int64(v) || y[1] != int64(v) || y[2] != 0 || int64(v) < oldest {
		return fmt.Errorf("%w: version %d answered with %d to %d, its worker went back %d times; %d was published before the request",
			testbed.ErrWrongBytes, v, y[0], y[1], y[2], oldest)
	}
	return nil
}
