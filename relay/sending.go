// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"context"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/ringbatch/ringbatch/gateway/oip"
)

// sending is requests on their way to a host: in one message, or in several that
// follow one another (groups).
type sending struct {
	*call
	t      *trip
	ctx    context.Context
	groups [][]int // the requests of each message
	plain  bool
	first  *exchange // of the first group
}

// send sends requests to a host, and does not wait for the answer: call receive.
// It returns nil if no host is usable.
func (t *trip) send(ctx context.Context, requests []int, been []*host) (s *sending) {
	ctx, cancel := context.WithCancelCause(ctx)
	c := t.r.hosts.choose(been, cancel)
	if c == nil {
		cancel(nil)
		return nil
	}
	defer func() {
		if s == nil { // a panic
			c.endCall()
			cancel(nil)
		}
	}()
	t.r.hosts.mu.Lock()
	plain, rows, bytes := c.host.plain, c.host.maxBatch, c.host.mostBytes(time.Now())
	t.r.hosts.mu.Unlock()
	begun := &sending{call: c, t: t, ctx: ctx, plain: plain, groups: groups(t.b, requests, plain, rows, bytes)}
	begun.first = begun.post(begun.groups[0])
	return begun
}

// receive waits for the answers, and returns the results with requests to send again.
func (s *sending) receive() (all []result) {
	defer s.cancel(nil)
	defer s.endCall()
	for i, group := range s.groups {
		x := s.first
		if i > 0 {
			x = s.post(group)
		}
		if res := x.receive(); len(res.again) > 0 {
			all = append(all, res)
		}
	}
	return all
}

// exchange is one message and its answer.
type exchange struct {
	*sending
	ctx      context.Context // ends when no client waits for these requests
	cancel   context.CancelCauseFunc
	requests []int
	route    *route
	began    time.Time
	trailer  metadata.MD
	stream   grpc.ClientStream
	err      error // of sending
}

// post sends a message; receive waits for the answer. post blocks only while the
// connection has no free stream.
func (s *sending) post(requests []int) (posted *exchange) {
	t := s.t
	x := &exchange{sending: s, requests: requests, route: &route{host: s.host}, began: time.Now()}
	x.ctx, x.cancel = context.WithCancelCause(s.ctx)
	m := t.r.encode(t.b, requests, s.plain)
	t.r.watch(x)
	defer func() {
		if posted == nil { // a panic
			t.r.unwatch(x)
		}
	}()
	x.stream, x.err = t.r.conn.NewStream(x.route.to(x.ctx), &grpc.StreamDesc{}, oip.GRPCInferenceService_ModelInfer_FullMethodName,
		grpc.ForceCodecV2(t.r.codec), grpc.Trailer(&x.trailer), grpc.MaxCallSendMsgSize(maxMessage),
		grpc.MaxCallRecvMsgSize(t.r.maxAnswer(t.b)))
	if x.err == nil {
		x.err = x.stream.SendMsg(m)
	}
	return x
}

func (x *exchange) receive() result {
	t, a, err := x.t, &answer{}, x.err
	defer x.cancel(nil)
	defer t.r.unwatch(x)
	if err == nil {
		err = x.stream.RecvMsg(a)
	}
	load, reported := oip.ParseLoad([]byte(strings.Join(x.trailer.Get(oip.LoadTrailer), "")))
	if err != nil {
		return t.failed(x, err, x.route.sent.Load())
	}
	x.host.learnLoad(load, reported, time.Since(x.began), float64(t.b.Rows())/float64(t.model.MaxBatchSize))
	defer a.Free()
	failed, err := a.write(t.b, x.requests)
	if err != nil {
		t.r.log.Warn("a host's answer cannot be used", "host", x.host.name, "error", err)
		t.fail(x.requests, fmt.Errorf("%s: %w", x.host.name, err))
		return result{}
	}
	return t.answered(x.host, x.requests, failed)
}
