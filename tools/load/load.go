// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"github.com/ringbatch/ringbatch/admin"
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
	cfg, c, err := l.crowd(ctx)
	if err != nil {
		return nil, err
	}
	defer c.close()
	go func() { stop(profile.AwaitNoWorker(ctx, admin.New(l.Socket), l.Model, l.Patience)) }()
	r, err := c.Watch(ctx, cfg, fmt.Sprintf("%d clients", l.Clients), nil, say)
	if r != nil {
		r.Config = cfg
	}
	if cause := context.Cause(ctx); err != nil && errors.Is(cause, status.ErrNoWorker) {
		err = cause
	}
	return r, err
}

// crowd attaches the clients.
func (l *Load) crowd(ctx context.Context) (*Config, *Crowd, error) {
	s, err := admin.New(l.Socket).Stats(ctx)
	if err != nil {
		return nil, nil, err
	}
	m, err := ModelStats(ctx, l.Socket, l.Model)
	if err != nil {
		return nil, nil, err
	}
	if l.Rows > m.MaxBatchSize {
		return nil, nil, fmt.Errorf("%w: requests of %d rows were asked for, the model's max_batch_size is %d", status.ErrTooLarge, l.Rows,
			m.MaxBatchSize)
	}
	inFlight := l.inFlight(m.SlotsFree)
	cfg := &Config{
		WorkerNum: l.Clients, WorkerBatch: l.Rows, MaxBatchSize: m.MaxBatchSize, ModelNum: len(m.Workers), WaitTime: Seconds(policy.Auto),
		ModelType: l.Model, Duration: Seconds(l.Window), Warmup: Seconds(l.Warmup), InFlight: inFlight, Rate: l.Rate,
		Stability: 10, MaxWindows: l.Windows, Seed: l.Seed, AllWindows: true,
	}
	if !m.WaitAuto {
		cfg.WaitTime = Seconds(m.WaitTimeMS * float64(time.Millisecond))
	}
	var workers []int
	for _, w := range m.Workers {
		if w.Pid > 0 {
			workers = append(workers, w.Pid)
		}
	}
	c := &Crowd{Groups: [3]CPUGroup{foreignCPU(s.Pid), foreignCPU(os.Getpid()), foreignCPU(workers...)},
		Socket: admin.New(l.Socket).Socket(), Model: l.Model}
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
		c.Reporters = append(c.Reporters, p)
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
	job := Job{Model: l.Model, Rows: l.Rows, InFlight: inFlight, Rate: l.Rate / float64(l.Clients),
		Seed: uint64(l.Seed)<<20 + uint64(i)}
	conn, err := client.Dial(ctx, l.Model, client.WithSocket(l.Socket), client.WithWindow(job.Window()), client.WithName("ringbatch bench"))
	if err != nil {
		return nil, err
	}
	interrupted := ctx.Done()
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	return &localProducer{Producer: &Producer{job: job, conn: conn}, interrupted: interrupted, ctx: ctx, cancel: cancel,
		reports: make(chan Report, 1)}, nil
}

// localProducer is a producer in this process.
type localProducer struct {
	*Producer
	ctx     context.Context
	cancel  context.CancelFunc
	quit    *atomic.Bool
	running bool // a window was sent and not received

	interrupted <-chan struct{}
	reports     chan Report
}

func (p *localProducer) Send(command any) error {
	p.running = true
	r := NewRecorder(command.(Order))
	r.quit = p.quit
	go func() {
		SleepUntil(r.window.Start)
		p.Load(p.ctx, r)
		p.reports <- *r.Report()
	}()
	return nil
}

func (p *localProducer) Receive(into any) error {
	p.running = false
	select {
	case *into.(*Report) = <-p.reports:
		return nil
	case <-p.interrupted:
	}
	p.cancel() // requests in flight may have no answer
	<-p.reports
	return progress.ErrInterrupted
}

// end cancels the requests in flight and detaches.
func (p *localProducer) end() {
	p.cancel()
	if p.running {
		_ = p.Receive(new(Report))
	}
	_ = p.conn.Close()
}

// close ends the clients of this process.
func (c *Crowd) close() {
	for _, r := range c.Reporters {
		if p, ok := r.(*localProducer); ok {
			p.quit.Store(true)
		}
	}
	for _, r := range c.Reporters {
		if p, ok := r.(*localProducer); ok {
			p.end()
		}
	}
}
