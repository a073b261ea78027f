// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/pad"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/tools/feed"
)

// Job is the load of one producer.
type Job struct {
	Socket   string
	Model    string
	Rows     int
	InFlight int
	Rate     float64 // requests per second of this producer; 0: closed loop
	Seed     uint64
}

// Window is the slots that the producer uses.
func (j Job) Window() int { return j.InFlight * j.Rows }

// Load runs one window: claim, write in place, commit, wait, read in place, release.
func (p *Producer) Load(ctx context.Context, r *Recorder) {
	if p.job.Rate > 0 {
		p.openLoop(ctx, r)
	} else {
		p.closedLoop(ctx, r)
	}
}

// Producer sends requests with one copy, of the input into the slot.
type Producer struct {
	job    Job
	conn   *client.Client
	inputs []inputRows // of requests, in turn
	sent   atomic.Uint64
	dims   []int // sizes of all variable dimensions

	windows int // open loops run so far
}

// inputRows are the rows of a request.
type inputRows struct {
	plain [][]byte        // per input tensor, as laid out in a slot
	given []tensor.Tensor // for models with variable sizes, whose rows are padded in the slot
}

// next is the input of the next request.
func (p *Producer) next() *inputRows {
	if len(p.inputs) == 1 {
		return &p.inputs[0]
	}
	return &p.inputs[p.sent.Add(1)%uint64(len(p.inputs))]
}

// closedLoop keeps InFlight requests in flight.
func (p *Producer) closedLoop(ctx context.Context, rec *Recorder) {
	loop := func() {
		for now := shm.Now(); !rec.Over(now); {
			now = p.request(ctx, rec, now)
		}
	}
	var others sync.WaitGroup
	for range p.job.InFlight - 1 {
		others.Go(loop)
	}
	loop()
	others.Wait()
}

// openLoop sends at the intended times, independently of answers. Latency counts from
// the intended time, also of a request that waits for one of the InFlight places.
// Requests that could not be sent before the end are counted as errors.
func (p *Producer) openLoop(ctx context.Context, rec *Recorder) {
	end := rec.window.End
	arrivals := make(chan int64, 1<<16)
	var unsent atomic.Int64
	var places sync.WaitGroup
	for range p.job.InFlight {
		places.Go(func() {
			for at := range arrivals {
				if rec.Over(shm.Now()) {
					unsent.Add(1)
					continue
				}
				p.request(ctx, rec, at)
			}
		})
	}
	// Every window has other arrivals, all from the seed.
	s := newSchedule(rec.window.Start, p.job.Rate, p.job.Seed+uint64(p.windows)<<32)
	p.windows++
	for at := s.arrival(); at < end; at = s.arrival() {
		if rec.Over(shm.Now()) { // the rate is too high for this loop
			unsent.Add(1)
			continue
		}
		SleepUntil(at)
		arrivals <- at
	}
	close(arrivals)
	places.Wait()
	rec.fail(end-1, "not_sent_in_time", unsent.Load())
}

// request runs a request that is due at the intended time, and returns its end.
func (p *Producer) request(ctx context.Context, rec *Recorder, intended int64) int64 {
	st, err := p.exchange(ctx, intended)
	now := shm.Now()
	if err != nil {
		rec.fail(now, errorName(err), 1)
		time.Sleep(time.Millisecond) // no storm of refusals
		return shm.Now()
	}
	rec.Add(now, now-intended, p.job.Rows, st)
	return now
}

// exchange runs one request and returns its stages. Waiting for a place in flight counts
// as waiting to claim.
func (p *Producer) exchange(ctx context.Context, intended int64) (Stages, error) {
	r, err := p.conn.Claim(ctx, p.job.Rows, p.dims...)
	if err != nil {
		return Stages{}, err
	}
	defer r.Release()
	claimed := shm.Now()
	if err := p.write(r); err != nil {
		return Stages{}, err
	}
	written := shm.Now()
	if err := r.Commit(ctx); err != nil {
		return Stages{}, err
	}
	st, err := p.wait(ctx, r)
	st[stageClaim], st[stageWrite] = claimed-intended, written-claimed
	return st, err
}

func (p *Producer) write(r client.Request) error {
	in := p.next()
	for _, t := range in.given {
		dst, err := r.Input(t.Name)
		if err == nil {
			err = pad.Copy(dst, t)
		}
		if err != nil {
			return err
		}
	}
	for k, rows := range in.plain {
		dst, err := r.InputBytes(k)
		if err != nil {
			return err
		}
		copy(dst, rows)
	}
	return nil
}

// wait waits for the answer and returns the stages after the commit.
func (p *Producer) wait(ctx context.Context, r client.Request) (Stages, error) {
	if err := r.Wait(ctx); err != nil {
		return Stages{}, err
	}
	t, err := r.Timing()
	return Stages{0, 0, int64(t.Queue), int64(t.Dispatch), int64(t.Compute), int64(t.Wake)}, err
}

// NewProducer returns one that sends random rows.
func NewProducer(conn *client.Client, job Job) *Producer {
	return &Producer{job: job, conn: conn, inputs: randomInputs(conn, job)}
}

// randomInputs are the rows of every request.
func randomInputs(c *client.Client, job Job) []inputRows {
	sig := c.Model().Signature
	var rows inputRows
	for i := range sig.Inputs {
		rows.plain = append(rows.plain, feed.Random(&sig.Inputs[i], job.Rows, job.Seed+uint64(i)<<40).Data)
	}
	return []inputRows{rows}
}

// errorName is the named error behind err, or its text.
func errorName(err error) string {
	var s status.Code
	if errors.As(err, &s) {
		return s.Name()
	}
	return err.Error()
}

// schedule is the Poisson arrivals of an open loop, the same for the same seed.
type schedule struct {
	rnd  *rand.Rand
	gap  float64 // mean, in nanoseconds
	next float64
}

func newSchedule(start int64, perSecond float64, seed uint64) *schedule {
	return &schedule{rnd: rand.New(rand.NewPCG(seed, 1)), gap: 1e9 / perSecond, next: float64(start)}
}

// arrival is the next intended send time, in nanoseconds.
func (s *schedule) arrival() int64 {
	s.next = min(s.next+s.rnd.ExpFloat64()*s.gap, 1<<62) // larger numbers are no times
	return int64(s.next)
}
