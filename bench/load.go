// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/bench/rig"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/tools/feed"
	"github.com/ringbatch/ringbatch/tools/profile"
)

// Load loads a running model with clients in this process. The result has the figures of
// the benchmark.
type Load struct {
	Socket, Model string
	Feed          func(*tensor.Signature) (*feed.Feed, error)
	Clients       int     // connections
	InFlight      int     // requests in flight of each; 0: one, or with a Rate up to 64 if the ring has room
	Rows          int     // per request
	Rate          float64 // requests per second of all together; 0: closed loop
	Warmup        time.Duration
	Window        time.Duration // length of one measurement
	Windows       int
	Seed          int64
	Patience      profile.Patience // with a model without workers
}

// Run loads the model. If ctx ends first, the error comes with the windows so far.
func (l *Load) Run(ctx context.Context, say *progress.Line) (*Result, error) {
	r, err := l.run(ctx, say)
	if err != nil && ctx.Err() != nil {
		err = progress.ErrInterrupted
	}
	return r, err
}

func (l *Load) run(ctx context.Context, say *progress.Line) (*Result, error) {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	f, err := newFleet(ctx)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	cfg, c, err := l.crowd(ctx)
	if err != nil {
		return nil, err
	}
	defer c.close()
	go func() { stop(profile.AwaitNoWorker(ctx, admin.New(l.Socket), l.Model, l.Patience)) }()
	r, err := c.watch(f, cfg, fmt.Sprintf("%d clients", l.Clients), nil, say)
	if r != nil {
		r.Config = cfg
	}
	if cause := context.Cause(ctx); err != nil && errors.Is(cause, status.ErrNoWorker) {
		err = cause
	}
	return r, err
}

// Print writes the result as the benchmark does.
func (r *Result) Print(w io.Writer) { r.print(w) }

// crowd attaches the clients.
func (l *Load) crowd(ctx context.Context) (*config, *crowd, error) {
	s, err := admin.New(l.Socket).Stats(ctx)
	if err != nil {
		return nil, nil, err
	}
	m, err := rig.ModelStats(ctx, l.Socket, l.Model)
	if err != nil {
		return nil, nil, err
	}
	if l.Rows > m.MaxBatchSize {
		return nil, nil, fmt.Errorf("%w: requests of %d rows were asked for, the model's max_batch_size is %d", status.ErrTooLarge, l.Rows,
			m.MaxBatchSize)
	}
	inFlight := l.inFlight(m.SlotsFree)
	cfg := &config{
		WorkerNum: l.Clients, WorkerBatch: l.Rows, MaxBatchSize: m.MaxBatchSize, ModelNum: len(m.Workers), WaitTime: seconds(policy.Auto),
		ModelType: l.Model, Duration: seconds(l.Window), Warmup: seconds(l.Warmup), InFlight: inFlight, Rate: l.Rate,
		Stability: 10, MaxWindows: l.Windows, Seed: l.Seed, allWindows: true,
	}
	if !m.WaitAuto {
		cfg.WaitTime = seconds(m.WaitTimeMS * float64(time.Millisecond))
	}
	var workers []int
	for _, w := range m.Workers {
		if w.Pid > 0 {
			workers = append(workers, w.Pid)
		}
	}
	c := &crowd{groups: [3]cpuGroup{foreignCPU(s.Pid), foreignCPU(os.Getpid()), foreignCPU(workers...)},
		socket: admin.New(l.Socket).Socket(), model: l.Model}
	quit := new(atomic.Bool)
	var rows *feed.Feed
	var inputs []inputRows
	for i := range l.Clients {
		p, err := l.attach(ctx, i, inFlight)
		if err == nil && rows == nil {
			sig := p.conn.Model().Signature
			if rows, err = l.Feed(&sig); err == nil {
				inputs = l.inputs(rows)
			} else {
				_ = p.conn.Close()
			}
		}
		if err != nil {
			c.close()
			return nil, nil, err
		}
		p.quit, p.inputs, p.dims = quit, inputs, rows.Dims()
		p.sent.Store(uint64(i * len(inputs) / l.Clients)) // clients start at different inputs
		c.reporters = append(c.reporters, p)
	}
	return cfg, c, nil
}

// openInFlight bounds the requests in flight of a client in an open loop.
const openInFlight = 64

// inFlight is InFlight, or a default for a ring with these free slots.
func (l *Load) inFlight(slotsFree int) int {
	switch {
	case l.InFlight > 0:
		return l.InFlight
	case l.Rate > 0:
		return max(1, min(openInFlight, slotsFree/(l.Clients*l.Rows)))
	}
	return 1
}

// Bounds of the inputs in memory.
const (
	mostInputs     = 1024
	mostInputBytes = 256 << 20
)

// inputs are the rows of consecutive requests, up to the bounds.
func (l *Load) inputs(rows *feed.Feed) (all []inputRows) {
	most := min(mostInputs, (rows.Len()+l.Rows-1)/l.Rows)
	for bytes := 0; len(all) < most && bytes < mostInputBytes; {
		in := inputRows{given: rows.Rows(len(all)*l.Rows, l.Rows)}
		for _, t := range in.given {
			bytes += len(t.Data)
			if len(rows.Dims()) == 0 { // fixed sizes: rows are copied as they are
				in.plain = append(in.plain, t.Data)
			}
		}
		if in.plain != nil {
			in.given = nil
		}
		all = append(all, in)
	}
	return all
}

func (l *Load) attach(ctx context.Context, i, inFlight int) (*localProducer, error) {
	job := producerJob{Model: l.Model, Rows: l.Rows, InFlight: inFlight, Rate: l.Rate / float64(l.Clients),
		Seed: uint64(l.Seed)<<20 + uint64(i)}
	conn, err := client.Dial(ctx, l.Model, client.WithSocket(l.Socket), client.WithWindow(job.window()), client.WithName("ringbatch bench"))
	if err != nil {
		return nil, err
	}
	interrupted := ctx.Done()
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	return &localProducer{producer: &producer{job: job, conn: conn}, interrupted: interrupted, ctx: ctx, cancel: cancel,
		reports: make(chan windowReport, 1), failures: make(chan error, 1)}, nil
}

// localProducer is a producer in this process.
type localProducer struct {
	*producer
	ctx     context.Context
	cancel  context.CancelFunc
	quit    *atomic.Bool
	running bool // a window was sent and not received

	interrupted <-chan struct{}
	reports     chan windowReport
	failures    chan error
}

func (p *localProducer) String() string { return "a client of " + p.job.Model }

func (p *localProducer) Send(command any) error {
	p.running = true
	r := newRecorder(command.(windowOrder))
	r.quit = p.quit
	go func() {
		rig.SleepUntil(r.window.Start)
		p.load(p.ctx, r)
		report, err := r.result()
		if err != nil {
			p.failures <- err
			return
		}
		p.reports <- *report
	}()
	return nil
}

func (p *localProducer) Receive(into any) error {
	p.running = false
	select {
	case err := <-p.failures:
		return err
	case *into.(*windowReport) = <-p.reports:
		return nil
	case <-p.interrupted:
	}
	p.cancel() // requests in flight may have no answer
	select {
	case <-p.failures:
	case <-p.reports:
	}
	return progress.ErrInterrupted
}

// end cancels the requests in flight and detaches.
func (p *localProducer) end() {
	p.cancel()
	if p.running {
		_ = p.Receive(new(windowReport))
	}
	_ = p.conn.Close()
}

// close ends the clients of this process.
func (c *crowd) close() {
	for _, r := range c.reporters {
		if p, ok := r.(*localProducer); ok {
			p.quit.Store(true)
		}
	}
	for _, r := range c.reporters {
		if p, ok := r.(*localProducer); ok {
			p.end()
		}
	}
}
