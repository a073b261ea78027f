// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
	"github.com/ringbatch/ringbatch/worker/weights"
)

// A version n of weightSpecs is filled with n, or with -n if no worker can load it.
var weightSpecs = []tensor.Spec{{Name: "a", DType: tensor.I64, Shape: []int{4000}}, {Name: "b", DType: tensor.I64}}

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
	job := r.brokerJob()
	job.Models[0] = weightsModel
	h := r.startHost(job, 0, testbed.Spec{})
	r.must(os.WriteFile(r.bed.Path(publishedFile), make([]byte, 8), 0o600))
	var kills [2]atomic.Int64 // of publishers, of workers
	kill := func(kind int, role string, labels []string, most int) (stop func()) {
		var over atomic.Bool
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			r.guard(func() {
				for ok := true; ok && !over.Load() && r.ctx.Err() == nil; kills[kind].Add(1) {
					_, _, ok = r.dies(role, victimJob{Model: weightsModel, Label: labels[r.intn(len(labels))], After: r.intn(most)})
				}
			})
		}()
		return func() { over.Store(true); <-ended }
	}
	stops := []func(){kill(0, "publisher", publisherLabels, 100)}
	w := r.victim("follower", victimJob{Model: weightsModel}) // lives
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

// playPublisher publishes versions as fast as it can, then dies at its label.
func playPublisher(c *testbed.Child, job victimJob) error {
	p, ctx := newPlayer(c, job), c.Context()
	published, err := os.OpenFile(filepath.Join(filepath.Dir(p.Socket), publishedFile), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	var w *weights.Publisher
	err = testbed.Eventually(enoughTime, func() (err error) { // the broker may not know yet that the one before is gone
		w, err = weights.NewPublisher(ctx, p.Model.Name, weightSpecs, weights.WithSocket(p.Socket))
		return err
	})
	if err != nil {
		return err
	}
	s, err := admin.New(p.Socket).Stats(ctx)
	if err != nil {
		return err
	}
	for next, first := int64(s.Weights[0].Last)+1, true; ; {
		label := ""
		if p.After--; p.After < 0 {
			label = p.Label
		}
		if label == "random" {
			p.dieWithin(200 * time.Microsecond)
		}
		b, err := w.Begin(ctx)
		if err != nil {
			return err
		}
		fill := next
		if !first && p.rng.IntN(50) == 0 { // never two in a row
			fill = -fill
		}
		for k := range weightSpecs {
			if k == 1 && label == "half-written" {
				p.die()
			}
			for at := b.Tensor(k); len(at) > 0; at = at[8:] {
				binary.NativeEndian.PutUint64(at, uint64(fill))
			}
		}
		if label == "written" {
			p.die()
		}
		v, err := w.Publish(b)
		switch {
		case errors.Is(err, status.ErrFailed) && strings.Contains(err.Error(), errNegative.Error()):
			first = true
			continue
		case err != nil || int64(v) != next:
			return fmt.Errorf("published version %d, not %d: %w", v, next, err)
		case label == "published":
			p.die()
		}
		if fill > 0 {
			if _, err := published.WriteAt(binary.NativeEndian.AppendUint64(nil, uint64(v)), 0); err != nil {
				return err
			}
		}
		next, first = next+1, fill < 0
		time.Sleep(time.Duration(max(0, p.rng.IntN(1000)-500)) * time.Microsecond)
	}
}

var errNegative = errors.New("negative weights")

// playFollower answers each request with the least and the most of its weights, read
// several times, and with the number of times at which its versions went back; then it dies at its label.
func playFollower(c *testbed.Child, job victimJob) error {
	p, ctx := newPlayer(c, job), c.Context()
	var last, backward, loads int64 // load is never called by two goroutines at a time
	load := func(v weights.View) error {
		if loads++; p.Label == "loading" && loads > int64(p.After) {
			p.die()
		}
		if int64(binary.NativeEndian.Uint64(v.Tensor(1))) < 0 {
			return errNegative
		}
		if int64(v.Version) < last {
			backward++
		}
		last = int64(v.Version)
		return nil
	}
	f, err := weights.Follow(ctx, p.Model.Name, load, weights.WithSocket(p.Socket))
	if err != nil {
		return err
	}
	var batches atomic.Int64
	cfg := p.Model.WorkerConfig(p.Socket)
	cfg.Weights, cfg.Concurrency = f, 2
	_ = c.Tell("attached", nil)
	err = worker.Serve(ctx, cfg, func(_ context.Context, b *worker.Batch) error {
		label := ""
		if batches.Add(1) > int64(p.After) {
			label = p.Label
		}
		switch label {
		case "taken":
			p.die()
		case "random":
			p.dieWithin(200 * time.Microsecond)
		}
		least, most := int64(math.MaxInt64), int64(math.MinInt64)
		reads := 2
		if batches.Load()%64 == 0 { // a slow batch: publishers pass it by
			reads = 2000
		}
		for range reads {
			for k := range weightSpecs {
				for at := b.Weights().Tensor(k); len(at) > 0; at = at[8:] {
					x := int64(binary.NativeEndian.Uint64(at))
					least, most = min(least, x), max(most, x)
				}
			}
		}
		for i := range b.Rows() {
			y := worker.Row[int64](b.Output(0), i)
			y[0], y[1], y[2] = least, most, backward
			if label == "half-written" {
				p.die()
			}
		}
		return nil
	})
	return errors.Join(err, f.Close())
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
