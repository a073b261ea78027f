// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/broker/supervise"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/ringbatch/ringbatch/internal/testbed"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/stats"
)

// --suite=kill: what clients notice when one of several workers is killed
// under load. The broker starts the workers itself, and so starts the killed
// one again.

// The course of events, from the moment when all producers run.
const (
	killAfter  = 4 * time.Second
	killTail   = 4 * time.Second // watched after the new worker attached
	killBucket = 100 * time.Millisecond
)

// killReport is the JSON of the suite.
type killReport struct {
	Config     *config          `json:"config"`
	Before     float64          `json:"items_per_s_before"`
	Without    float64          `json:"items_per_s_without_it"` // between the kill and the new worker
	After      float64          `json:"items_per_s_after"`      // the last two seconds
	AttachedS  float64          `json:"attached_after_s"`       // from the kill to the new worker's first batch
	RecoveredS float64          `json:"recovered_after_s"`      // from its attaching until half a second ran at 95 % of before
	Requests   int64            `json:"requests"`
	Errors     map[string]int64 `json:"errors"`
	Requeued   uint64           `json:"requeued"`
	Buckets    []int64          `json:"items_per_100ms"`
}

func (r *killReport) print(w io.Writer) {
	fmt.Fprintf(w, "%d producers, %d workers, one of them killed by SIGKILL\n\n", r.Config.WorkerNum, r.Config.ModelNum)
	fmt.Fprintf(w, "before       %s items/s\nwithout it   %s items/s\nafter        %s items/s\n", big(r.Before), big(r.Without), big(r.After))
	fmt.Fprintf(w, "started again and attached %.1f s after the kill; 95 %% of the throughput %.1f s after that\n", r.AttachedS, r.RecoveredS)
	fmt.Fprintf(w, "%d requests, %d requeued, errors: %v\n", r.Requests, r.Requeued, r.Errors)
}

// supervisedJob is a broker that starts its workers.
type supervisedJob struct {
	Socket    string
	Command   []string
	Instances int
}

func supervisedBrokerRole(c *testbed.Child, job supervisedJob) error {
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	b, err := broker.New(broker.Config{Socket: job.Socket, Logger: log, MPS: true, Workers: []supervise.Worker{{Command: job.Command, Instances: job.Instances}}})
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	if err := c.Ready(); err != nil {
		return err
	}
	go func() { <-c.Commands(); stop() }()
	if err := b.Serve(ctx); err != nil {
		return err
	}
	return c.Tell("result", nil)
}

// steadyJob is a producer that runs until it is told to stop.
type steadyJob struct{ producerJob }

type steadyReport struct {
	Buckets []int64 // requests that ended well, per killBucket since it was told to go
	Errors  map[string]int64
}

func steadyProducerRole(c *testbed.Child, job steadyJob) error {
	ctx, cancel := context.WithTimeout(context.Background(), startTime)
	defer cancel()
	conn, err := client.Dial(ctx, job.Model, client.WithSocket(job.Socket), client.WithWindow(job.Rows), client.WaitForModel())
	if err != nil {
		return err
	}
	p := &producer{job: job.producerJob, conn: conn, inputs: randomInputs(conn, job.producerJob)}
	if err := c.Ready(); err != nil {
		return err
	}
	<-c.Commands()
	r := steadyReport{Errors: map[string]int64{}}
	start := shm.Now()
	for {
		select {
		case <-c.Commands():
			return c.Tell("result", r)
		default:
		}
		if _, err := p.exchange(background, shm.Now()); err != nil {
			r.Errors[errorName(err)]++
			time.Sleep(time.Millisecond)
			continue
		}
		at := int((shm.Now() - start) / int64(killBucket))
		for len(r.Buckets) <= at {
			r.Buckets = append(r.Buckets, 0)
		}
		r.Buckets[at] += int64(job.Rows)
	}
}

func runKill(ctx context.Context, cfg *config, say *progress.Line) (*killReport, error) {
	if cfg.ModelType != "torch" || cfg.ModelNum < 2 {
		return nil, fmt.Errorf("--suite=kill needs --model_type=torch and at least two of --model_num")
	}
	f, err := newFleet(ctx)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	socket := f.Path("kill.sock")
	command, err := torchCommand(cfg)
	if err != nil {
		return nil, err
	}
	say.Say("starting the broker, which starts %d workers", cfg.ModelNum)
	b, err := f.StartReady(testbed.Spec{Role: "supervised broker", Job: supervisedJob{socket, command, cfg.ModelNum}})
	if err != nil {
		return nil, err
	}
	first, err := awaitWorkers(ctx, socket, cfg.ModelNum, 0)
	if err != nil {
		return nil, err
	}
	ps, err := f.StartAll(cfg.WorkerNum, func(i int) testbed.Spec {
		return testbed.Spec{Role: "steady producer", Procs: 2, Job: steadyJob{producerJob{
			Socket: socket, Model: modelName, Rows: cfg.WorkerBatch, InFlight: 1, Seed: uint64(i)}}}
	})
	if err != nil {
		return nil, err
	}
	for _, p := range ps {
		if err := p.Send("go"); err != nil {
			return nil, err
		}
	}
	began := time.Now()
	if err := pause(ctx, killAfter); err != nil {
		return nil, err
	}
	victim := first.Workers[0].Pid
	say.Say("killing worker %d", victim)
	if err := syscall.Kill(victim, syscall.SIGKILL); err != nil {
		return nil, fmt.Errorf("kill worker %d: %w", victim, err)
	}
	killed := time.Since(began)
	if _, err := awaitWorkers(ctx, socket, cfg.ModelNum, victim); err != nil {
		return nil, err
	}
	attached := time.Since(began)
	if err := pause(ctx, killTail); err != nil {
		return nil, err
	}
	last, err := modelStats(ctx, socket, modelName)
	if err != nil {
		return nil, err
	}
	r := &killReport{Config: cfg, Errors: map[string]int64{}, AttachedS: (attached - killed).Seconds(), Requeued: last.Requeued}
	for _, p := range ps {
		if err := p.Send("stop"); err != nil {
			return nil, err
		}
	}
	for _, p := range ps {
		var s steadyReport
		if err := p.Receive(&s); err != nil {
			return nil, err
		}
		r.add(&s)
	}
	r.judge(killed, attached)
	_ = b.Send("stop")
	_ = b.Receive(nil)
	return r, nil
}

func (r *killReport) add(s *steadyReport) {
	for i, n := range s.Buckets {
		if i == len(r.Buckets) {
			r.Buckets = append(r.Buckets, 0)
		}
		r.Buckets[i] += n
		r.Requests += n
	}
	for name, n := range s.Errors {
		r.Errors[name] += n
	}
}

// judge computes the rates around the two moments.
func (r *killReport) judge(killed, attached time.Duration) {
	k, a, end := int(killed/killBucket), int(attached/killBucket), len(r.Buckets)-1 // the last bucket is not whole
	r.Before, r.Without, r.After = r.rate(k-20, k), r.rate(k, a), r.rate(end-20, end)
	r.RecoveredS = -1
	for i := a; i+5 <= end; i++ {
		if r.rate(i, i+5) >= 0.95*r.Before {
			r.RecoveredS = (time.Duration(i+5-a) * killBucket).Seconds()
			return
		}
	}
}

// rate is items per second of buckets from..to.
func (r *killReport) rate(from, to int) float64 {
	from, to = max(0, from), min(to, len(r.Buckets))
	if to <= from {
		return 0
	}
	var n int64
	for _, b := range r.Buckets[from:to] {
		n += b
	}
	return float64(n) / (time.Duration(to-from) * killBucket).Seconds()
}

// awaitWorkers waits until n workers are attached, none of them with pid not.
func awaitWorkers(ctx context.Context, socket string, n, not int) (*stats.Model, error) {
	for end := time.Now().Add(startTime); time.Now().Before(end); {
		if err := pause(ctx, 20*time.Millisecond); err != nil {
			return nil, err
		}
		s, err := admin.New(socket).Stats(ctx)
		if err != nil {
			continue
		}
		for i := range s.Models {
			ws := s.Models[i].Workers
			if len(ws) == n && !slices.ContainsFunc(ws, func(w stats.Worker) bool { return w.Pid == not || w.State == "dying" }) {
				return &s.Models[i], nil
			}
		}
	}
	return nil, fmt.Errorf("%d workers did not attach within %v", n, startTime)
}

// torchCommand is how the broker starts a worker.
func torchCommand(cfg *config) ([]string, error) {
	j := cfg.model()
	args, err := torchArgs(j)
	if err != nil {
		return nil, err
	}
	command := append([]string{cmp.Or(os.Getenv("PYTHON"), "python3")}, args...)
	return append(command, "--name", modelName, "--max_batch_size", strconv.Itoa(cfg.MaxBatchSize), "--slots", strconv.Itoa(cfg.slots()),
		"--wait_time", strconv.FormatFloat(cfg.WaitTime.d().Seconds(), 'g', -1, 64)), nil
}
