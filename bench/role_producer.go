package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/shm"
)

// producerJob is one producer process.
type producerJob struct {
	Socket   string
	Model    string
	Rows     int
	InFlight int
	Rate     float64 // requests per second of this producer; 0: closed loop
	Seed     uint64
}

// producerRole sends requests without copies beyond the one that writes the
// input: claim, write in place, commit, wait, read in place, release.
func producerRole(c *child) error {
	var job producerJob
	if err := c.next(&job); err != nil {
		return err
	}
	ctx := context.Background()
	conn, err := client.Dial(ctx, job.Model, client.WithSocket(job.Socket), client.WithWindow(job.InFlight*job.Rows))
	if err != nil {
		return err
	}
	if err := c.ready(); err != nil {
		return err
	}
	var o windowOrder
	if err := c.next(&o); err != nil {
		return err
	}
	p := &producer{job: job, conn: conn, rec: newRecorder(), inputs: randomInputs(conn, job)}
	go c.reportWindows(p.rec, o)
	sleepUntil(o.Start)
	if job.Rate > 0 {
		p.openLoop(ctx, o.Start)
	} else {
		p.closedLoop(ctx)
	}
	return nil
}

type producer struct {
	job    producerJob
	conn   *client.Client
	rec    *recorder
	inputs [][]byte // a request's rows, per input tensor
}

// closedLoop keeps InFlight requests in flight: each answer is followed by
// the next request.
func (p *producer) closedLoop(ctx context.Context) {
	loop := func() {
		for {
			p.request(ctx, shm.Now())
		}
	}
	for range p.job.InFlight - 1 {
		go loop()
	}
	loop()
}

// openLoop sends at the intended times, whatever the answers do. A request
// that has to wait for one of the InFlight places is late; its latency counts
// from when it should have been sent.
func (p *producer) openLoop(ctx context.Context, start int64) {
	arrivals := make(chan int64, 1<<16)
	for range p.job.InFlight {
		go func() {
			for at := range arrivals {
				p.request(ctx, at)
			}
		}()
	}
	for s := newSchedule(start, p.job.Rate, p.job.Seed); ; {
		at := s.arrival()
		sleepUntil(at)
		arrivals <- at
	}
}

// request runs one, and records it as having been meant for intended.
func (p *producer) request(ctx context.Context, intended int64) {
	st, err := p.exchange(ctx, intended)
	if err != nil {
		p.rec.fail(err)
		time.Sleep(time.Millisecond) // no storm of refusals
		return
	}
	p.rec.add(shm.Now()-intended, p.job.Rows, st)
}

// exchange is one request, and where its time went. Waiting for a place among
// those in flight counts as waiting to claim.
func (p *producer) exchange(ctx context.Context, intended int64) (stages, error) {
	r, err := p.conn.Claim(ctx, p.job.Rows)
	if err != nil {
		return stages{}, err
	}
	defer r.Release()
	claimed := shm.Now()
	for k, rows := range p.inputs {
		dst, err := r.InputBytes(k)
		if err != nil {
			return stages{}, err
		}
		copy(dst, rows)
	}
	written := shm.Now()
	if err := r.Commit(ctx); err != nil {
		return stages{}, err
	}
	if err := r.Wait(ctx); err != nil {
		return stages{}, err
	}
	t, err := r.Timing()
	return stages{claimed - intended, written - claimed, int64(t.Queue), int64(t.Dispatch), int64(t.Compute), int64(t.Wake)}, err
}

// randomInputs are rows for one request: normal numbers where the tensor is
// f32, small bytes elsewhere.
func randomInputs(c *client.Client, job producerJob) [][]byte {
	rnd := rand.New(rand.NewPCG(job.Seed, 3))
	var all [][]byte
	for _, spec := range c.Model().Signature.Inputs {
		n := job.Rows * spec.RowElems()
		if spec.DType == shm.F32 {
			x := make([]float32, n)
			for i := range x {
				x[i] = float32(rnd.NormFloat64())
			}
			all = append(all, shm.Of("", x, n).Data)
			continue
		}
		b := make([]byte, n*spec.DType.Size())
		for i := range b {
			b[i] = byte(rnd.IntN(64))
		}
		all = append(all, b)
	}
	return all
}

// errorName is the named error behind err, or its text.
func errorName(err error) string {
	var s shm.Status
	if errors.As(err, &s) {
		return s.Name()
	}
	return err.Error()
}
