// SPDX-License-Identifier: Apache-2.0

package grpcapi

import (
	"context"
	"errors"
	"io"
	"maps"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
)

func (d *rpcDoor) infer(ctx context.Context, decode func(any) error) (_ any, err error) {
	defer d.guard(&err)
	m := messages.Get().(*message)
	if err := decode(m); err != nil {
		m.free()
		return nil, err
	}
	a, err := d.run(ctx, m, nil, nil)
	if err != nil {
		return nil, rpcError(err)
	}
	return a, nil
}

// run runs one inference when after is closed, and frees its message. after may be nil.
// send sends an answer of a stream before the last; nil: it is no stream.
func (d *rpcDoor) run(ctx context.Context, m *message, send func(any) error, after <-chan struct{}) (a *rpcAnswer, err error) {
	committed := false
	defer func() {
		if err != nil && !committed && send == nil {
			_ = grpc.SetTrailer(ctx, metadata.Pairs(oip.NotRunTrailer, core.NameOf(err)))
		}
	}()
	freed := false
	free := func() {
		if !freed {
			freed = true
			m.free()
		}
	}
	defer free()
	who, conn, err := d.rpcCall(ctx)
	if err != nil {
		return nil, err
	}
	if err := d.g.BeginRequest(who); err != nil {
		return nil, err
	}
	defer d.g.EndRequest(who)
	if err := m.Split(); err != nil {
		return nil, err
	}
	k, as, err := d.g.Models.Get(ctx, nameOf(m.Model), nameOf(m.Version))
	if err != nil {
		return nil, err
	}
	c := rpcCall{core.NewCall(k, as, who)}
	a, err = d.runCall(ctx, c, m, free, conn, send, after)
	committed = c.Committed
	c.reportLoad(ctx)
	if err != nil || a.call == nil {
		c.Count(err)
		c.Done()
	}
	return a, err
}

func (d *rpcDoor) runCall(ctx context.Context, c rpcCall, m *message, free func(), conn *core.Conn, send func(any) error,
	after <-chan struct{}) (*rpcAnswer, error) {
	if m.inflated.Taken > 0 {
		c.Memory, m.inflated = m.inflated, core.Memory{}
	} else if err := c.Take(m.Data.Len()); err != nil {
		return nil, err
	}
	if err := c.readMessage(&m.Request); err != nil {
		return nil, err
	}
	if err := c.Check(); err != nil {
		return nil, err
	}
	if after != nil {
		select {
		case <-after:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	c.OnFilled = free // the transport gets its buffers back before the wait
	if send != nil && c.Parts {
		return c.runInParts(ctx, conn, send)
	}
	if err := c.Run(ctx); err != nil {
		return nil, err
	}
	return c.encode(conn, send != nil)
}

// runInParts answers as Triton's decoupled models do: an answer for each part, one with
// the other outputs, and at last an empty one that says that it is the last.
func (c rpcCall) runInParts(ctx context.Context, conn *core.Conn, send func(any) error) (*rpcAnswer, error) {
	answer := func(outputs []core.Output, last bool) *rpcAnswer {
		one := *c.Call
		one.Outputs, one.Parameters = outputs, oip.AppendBool(nil, "triton_final_response", last)
		return rpcCall{&one}.copied(conn)
	}
	taken := 0
	take := func(size int) error {
		more := 2*size - taken // the part and its copy
		if more <= 0 {
			return nil
		}
		taken += more
		return c.Take(more)
	}
	c.OnPart = func(o *core.Output) error {
		if err := take(o.Size); err != nil {
			return err
		}
		return send(answer([]core.Output{*o}, false))
	}
	if err := c.Run(ctx); err != nil {
		return nil, err
	}
	if rest := c.Rest(); len(rest) > 0 {
		size := 0
		for i := range rest {
			size += rest[i].Size
		}
		if err := take(size); err != nil {
			return nil, err
		}
		if err := send(answer(rest, false)); err != nil {
			return nil, err
		}
	}
	return answer(nil, true), nil
}

// runOfStream is run for a request of a stream: an error becomes an answer with the
// request's id.
func (d *rpcDoor) runOfStream(ctx context.Context, m *message, id string, after <-chan struct{}, send func(any) error) (answer any) {
	var err error
	defer func() {
		if err != nil {
			answer = streamError(id, err)
		}
	}()
	defer d.guard(&err)
	answer, err = d.run(ctx, m, send, after)
	return answer
}

// peek reads a request's id, which sequence of a model with state it belongs to, and whether it takes parts.
func (d *rpcDoor) peek(m *message) (id, sequence string, inParts bool) {
	var err error
	defer d.guard(&err)
	defer m.Reset()
	if m.Split() != nil { // run returns the error
		return "", "", false
	}
	for _, b := range m.Parameters {
		p, err := oip.ReadParameter(b)
		switch {
		case err != nil:
		case string(p.Key) == finalResponse:
			inParts = p.Choice == oip.ChoiceBool && p.Bits != 0
		case string(p.Key) == sequenceID && d.g.HasState(nameOf(m.Model), nameOf(m.Version)):
			if of, err := readSequenceID(&p); err == nil && of != (core.SequenceID{}) {
				sequence = nameOf(m.Model) + " " + of.String()
			}
		}
	}
	return string(m.ID[:min(len(m.ID), core.MaxIDBytes)]), sequence, inParts
}

// lastSteps are the last steps of a stream's sequences: a step begins when the channel
// of the step before it is closed.
type lastSteps map[string]chan struct{}

func (l lastSteps) add(sequence string, step chan struct{}) (before <-chan struct{}) {
	if sequence == "" {
		return nil
	}
	if len(l) > 2*streamDepth { // most have ended
		maps.DeleteFunc(l, func(_ string, ended chan struct{}) bool {
			select {
			case <-ended:
				return true
			default:
				return false
			}
		})
	}
	before, l[sequence] = l[sequence], step
	return before
}

// streamDepth bounds the requests in flight of a stream.
const streamDepth = 64

// answers are those of a stream, for the goroutine that sends them.
type answers struct {
	line  chan chan any // a place for each request with one answer, in order
	parts chan any      // answers to requests that take parts, as they come; nil after the last of a request
	open  chan struct{} // a token for each request that is accepted and not answered
}

// inferStream answers ModelStreamInfer: requests run together, but the steps of a
// sequence one after the other. Single answers come in the order of their requests, and
// parts as soon as they are there.
//
//  1. a second goroutine receives requests and starts each
//  2. a place in line waits for each single answer, in order
//  3. this goroutine sends the answers
//
// A drain ends the stream after the answers of accepted requests: a request gets
// its token before it is accepted.
func (d *rpcDoor) inferStream(s grpc.ServerStream) error {
	ctx, cancel := context.WithCancel(s.Context())
	defer cancel()
	a := answers{line: make(chan chan any, streamDepth), parts: make(chan any), open: make(chan struct{}, streamDepth)}
	received := make(chan error, 1)
	go func() {
		err := d.receive(ctx, s, a)
		if err != nil {
			cancel()
		}
		received <- err
	}()
	refuses := d.g.Refuses
	line, parts, place := a.line, a.parts, (chan any)(nil)
	var failed error
	for line != nil || parts != nil || place != nil {
		next := line
		if place != nil {
			next = nil
		}
		var answer any
		more := true
		select {
		case place, more = <-next:
			if !more {
				line = nil
			}
			continue
		case answer, more = <-place:
			if !more {
				place = nil
				<-a.open
			}
		case answer, more = <-parts:
			if !more {
				parts = nil
			} else if answer == nil {
				<-a.open
			}
		case <-refuses:
			refuses = nil
		}
		if answer != nil {
			if failed = d.sendAnswer(s, answer, failed); failed != nil {
				cancel()
			}
		}
		if refuses == nil && len(a.open) == 0 {
			return rpcError(core.ErrDraining)
		}
	}
	if err := <-received; err != nil {
		return err
	}
	if end, ok := s.Context().Deadline(); ok && time.Until(end) < time.Millisecond { // the ring's clock may be ahead
		return rpcError(context.DeadlineExceeded)
	}
	return failed
}

// sendAnswer sends an answer of a stream, or drops it if an earlier one failed.
func (d *rpcDoor) sendAnswer(s grpc.ServerStream, a any, failed error) error {
	answer, _ := a.(*rpcAnswer)
	switch {
	case failed != nil && answer != nil:
		answer.drop()
	case failed != nil:
	case answer != nil && answer.part > 0:
		slow := time.AfterFunc(d.g.AnswerTime(answer.part), answer.hangUp)
		defer slow.Stop()
		return s.SendMsg(a)
	default:
		return s.SendMsg(a)
	}
	return failed
}

// receive starts the requests of a stream until it ends, and waits for those that take parts.
func (d *rpcDoor) receive(ctx context.Context, s grpc.ServerStream, a answers) error {
	var inParts sync.WaitGroup
	defer func() {
		close(a.line)
		inParts.Wait()
		close(a.parts)
	}()
	steps := lastSteps{}
	for {
		m := messages.Get().(*message)
		err := s.RecvMsg(m)
		var refused *core.Refusal // of a compressed message
		if err != nil && !errors.As(err, &refused) {
			m.free()
			if errors.Is(err, io.EOF) {
				err = nil
			}
			return err
		}
		select { // too many open requests stop the reading of the stream
		case a.open <- struct{}{}:
		case <-ctx.Done():
			m.free()
			return ctx.Err()
		}
		place := make(chan any, 1)
		if refused != nil {
			m.free()
			place <- streamError("", refused)
			close(place)
			a.line <- place
			continue
		}
		id, sequence, takesParts := d.peek(m)
		ended := make(chan struct{})
		before := steps.add(sequence, ended)
		if !takesParts {
			a.line <- place
			go func() {
				defer close(ended)
				defer close(place)
				place <- d.runOfStream(ctx, m, id, before, func(any) error { return nil })
			}()
			continue
		}
		inParts.Go(func() {
			send := func(answer any) error {
				select {
				case a.parts <- answer:
					return nil
				case <-ctx.Done():
					return ctx.Err()
				}
			}
			defer close(ended)
			_ = send(d.runOfStream(ctx, m, id, before, send))
			_ = send(nil)
		})
	}
}

func streamError(id string, err error) proto.Message {
	return &oip.ModelStreamInferResponse{ErrorMessage: core.TextOf(err),
		InferResponse: &oip.ModelInferResponse{Id: strings.ToValidUTF8(id, "?")}}
}

// nameOf cuts a name to the length that a model's name can have.
func nameOf(b []byte) string { return string(b[:min(len(b), core.MaxNameBytes)]) }
