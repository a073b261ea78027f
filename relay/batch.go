// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	rpcstatus "google.golang.org/grpc/status"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/relaywire"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/worker"
)

// trip is one batch on its way: to a host, and where that fails to others.
type trip struct {
	r     *relay
	b     *worker.Batch
	model *policy.Settings // of the model here
}

// How often hosts that were sent a batch may go away before its requests go on
// one by one, and how often with a request that goes alone. The request that
// makes hosts die is then found, fails, and takes nothing with it but these.
const (
	lossesTogether = 2
	lossesAlone    = 1
)

// run ends every request of the batch.
func (t *trip) run(ctx context.Context) {
	all := make([]int, t.b.Len())
	for i := range all {
		all[i] = i
	}
	ctx, cancel := context.WithDeadline(ctx, t.until(all))
	defer cancel()
	suspects := t.deliver(ctx, all, lossesTogether)
	for _, i := range suspects {
		for range t.deliver(ctx, []int{i}, lossesAlone) {
			t.b.Fail(i, fmt.Errorf("%w: %d hosts went away while they ran it", status.ErrWorkerDied, lossesTogether+lossesAlone))
		}
	}
}

// until is when nobody waits any more, or the broker would lose patience with
// this worker.
func (t *trip) until(requests []int) time.Time {
	last := t.b.Dispatched() + int64(t.model.Lease)*9/10
	latest := int64(0)
	for _, i := range requests {
		d := t.b.Request(i).Deadline
		if d == 0 {
			latest = last
			break
		}
		latest = max(latest, d)
	}
	return time.Now().Add(time.Duration(min(last, latest) - shm.Now()))
}

// stillOpen leaves out the requests that nobody waits for.
func (t *trip) stillOpen(requests []int) (open []int) {
	for _, i := range requests {
		if t.b.Open(i) {
			open = append(open, i)
		}
	}
	return open
}

// deliver sends requests together until each has ended, and returns those whose
// hosts went away too often.
func (t *trip) deliver(ctx context.Context, requests []int, losses int) (suspects []int) {
	var been []*host
	var last error // of the last host that refused
	for sends, lost := 0, 0; ; {
		changed := t.r.hosts.wait()
		if requests = t.stillOpen(requests); len(requests) == 0 {
			return nil
		}
		if ctx.Err() != nil {
			t.fail(requests, t.late(last))
			return nil
		}
		callCtx, cancel := context.WithCancelCause(ctx)
		c := t.r.hosts.choose(been, cancel)
		if c == nil {
			cancel(nil)
			t.r.hosts.pause(ctx, retryPause, changed)
			continue
		}
		res := t.send(callCtx, c, requests)
		c.end()
		cancel(nil)
		if requests = res.again; len(requests) == 0 {
			return nil
		}
		been = append(been, c.host)
		last = res.err
		switch {
		case res.lost:
			if lost++; lost >= losses {
				return requests
			}
			t.r.log.Info("batch goes to another host", "left", c.host.name, "requests", len(requests), "reason", res.err)
		case !res.sent: // that host has nothing to do with it
			t.r.hosts.pause(ctx, notSentPause, changed)
			continue
		}
		if sends++; sends >= t.r.cfg.Attempts {
			t.fail(requests, res.err)
			return nil
		}
		if !res.lost { // it was refused: wherever it goes, a little later
			t.r.hosts.pause(ctx, refusedPause, nil)
		}
	}
}

const (
	retryPause   = 50 * time.Millisecond
	notSentPause = 2 * time.Millisecond
	refusedPause = 5 * time.Millisecond
)

// late is the error of requests whose time was over before a host took them.
func (t *trip) late(last error) error {
	if last == nil {
		last = t.r.hosts.complaint()
	}
	return fmt.Errorf("%w: no host answered in time: %w", status.ErrFailed, last)
}

func (t *trip) fail(requests []int, err error) {
	for _, i := range requests {
		t.b.Fail(i, err)
	}
}

// result is what became of a sending.
type result struct {
	again []int // requests that may go to another host
	sent  bool  // the host may have run them
	lost  bool  // it went away meanwhile
	err   error // why they may
}

// send sends requests to one host: in one message, unless that host is another
// server than ours and they differ in shape.
func (t *trip) send(ctx context.Context, c *call, requests []int) (all result) {
	t.r.hosts.mu.Lock()
	plain, most := c.host.plain, c.host.maxBatch
	t.r.hosts.mu.Unlock()
	for _, group := range groups(t.b, requests, plain, most) {
		res := t.sendGroup(ctx, c, group, plain)
		all.again = append(all.again, res.again...)
		all.sent, all.lost = all.sent || res.sent, all.lost || res.lost
		if res.err != nil {
			all.err = res.err
		}
	}
	return all
}

func (t *trip) sendGroup(ctx context.Context, c *call, requests []int, plain bool) result {
	m := t.r.encode(t.b, requests, plain)
	done := t.r.watch(&sending{t.b, requests, c.cancel})
	defer done()
	var trailer metadata.MD
	rt, a := &route{host: c.host}, &answer{}
	began := time.Now()
	err := t.r.conn.Invoke(rt.to(ctx), oip.GRPCInferenceService_ModelInfer_FullMethodName, m, a,
		grpc.ForceCodecV2(t.r.codec), grpc.Trailer(&trailer), grpc.MaxCallSendMsgSize(maxMessage), grpc.MaxCallRecvMsgSize(t.r.maxAnswer(t.b)))
	load, reported := relaywire.ParseLoad([]byte(strings.Join(trailer.Get(relaywire.LoadTrailer), "")))
	if err != nil {
		return t.failed(ctx, c.host, requests, err, rt.sent.Load())
	}
	c.host.answered(load, reported, time.Since(began), float64(t.b.Rows())/float64(t.model.MaxBatchSize))
	defer a.free()
	failed, err := a.write(t.b, requests)
	if err != nil {
		t.r.log.Warn("a host's answer cannot be used", "host", c.host.name, "error", err)
		t.fail(requests, fmt.Errorf("%s: %w", c.host.name, err))
		return result{sent: true}
	}
	return t.failedAlone(c.host, requests, failed)
}

// failedAlone ends the requests that failed by themselves, but for those that
// another host may do better with.
func (t *trip) failedAlone(h *host, requests []int, failed map[int]failure) (res result) {
	res.sent = true
	if len(failed) == 0 {
		return res
	}
	for _, i := range requests {
		f, ok := failed[i]
		if !ok {
			continue
		}
		code := codeNamed(f.name)
		err := fmt.Errorf("%w: %s: %s", code, h.name, f.text)
		switch {
		case code.Retryable():
			res.again, res.err = append(res.again, i), err
		case code.Group() == status.Ends && code != status.ErrFailed:
			t.b.Fail(i, err)
		default: // the model's own words are enough
			t.b.Fail(i, errors.New(strings.TrimPrefix(f.text, status.ErrFailed.Error()+": ")))
		}
	}
	if len(res.again) > 0 {
		h.overloaded()
	}
	return res
}

// codeNamed is a status by its name; a later release may have more of them.
func codeNamed(name string) status.Code {
	for _, code := range status.All() {
		if code.Name() == name {
			return code
		}
	}
	return status.ErrFailed
}

// failed decides what a call's error means for its requests.
func (t *trip) failed(ctx context.Context, h *host, requests []int, err error, sent bool) result {
	if cause := context.Cause(ctx); errors.Is(cause, errHostSilent) {
		return result{requests, true, true, fmt.Errorf("%w: %s: %w", status.ErrBrokerGone, h.name, cause)}
	} else if errors.Is(cause, errNobodyWaits) {
		return result{}
	}
	s := rpcstatus.Convert(err)
	named := func(code status.Code) error { return fmt.Errorf("%w: %s: %s", code, h.name, s.Message()) }
	switch s.Code() {
	case codes.DeadlineExceeded, codes.Canceled:
		if ctx.Err() != nil { // ours: its requests have ended, or the lease is nearly over
			t.fail(t.stillOpen(requests), named(status.ErrExpired))
			return result{sent: true}
		}
		return result{requests, sent, sent, named(status.ErrBrokerGone)} // a proxy's or the host's own
	case codes.Unavailable:
		return result{requests, sent && !refused(s.Message()), sent && !refused(s.Message()), named(status.ErrBrokerGone)}
	case codes.ResourceExhausted:
		if strings.Contains(s.Message(), "message larger than max") {
			t.fail(requests, fmt.Errorf("%s: a batch is larger than it takes (%s): lower max_batch_size, or raise --max_message_bytes there", h.name, s.Message()))
			return result{sent: true}
		}
		h.overloaded()
		return result{requests, true, false, named(status.ErrQueueFull)}
	case codes.Unauthenticated, codes.PermissionDenied, codes.NotFound, codes.Unimplemented:
		h.unwell(problem(err), false)
		return result{requests, false, false, named(status.ErrBrokerGone)}
	case codes.InvalidArgument, codes.FailedPrecondition: // another model than we believe?
		if t.r.differs(h) {
			return result{requests, false, false, named(status.ErrBrokerGone)}
		}
	}
	t.fail(requests, fmt.Errorf("%s: %s", h.name, s.Message()))
	return result{sent: true}
}

// refused tells that a host answered that it takes nothing: it has not run it.
func refused(text string) bool {
	for _, words := range []string{
		"shutting down", "not ready", "no broker", // a gateway's
		"no healthy upstream", "remote connection failure", "delayed connect error", // Envoy's: it reached no host
	} {
		if strings.Contains(text, words) {
			return true
		}
	}
	return false
}

// maxMessage is what gRPC can send at all.
const maxMessage = 1<<31 - 1

// maxAnswer bounds the memory of an answer: what the outputs of such a batch can
// have, and a little for their names.
func (r *relay) maxAnswer(b *worker.Batch) int {
	n := maxMetaBytes
	for k := range b.Layout().Outputs {
		n += b.Rows() * int(b.Layout().Outputs[k].Stride)
	}
	return min(n, maxMessage)
}
