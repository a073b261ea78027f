// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc"
)

// drain first says that it is not ready, so that nobody sends anything new
// here, and then lets accepted requests finish.
func (g *Gateway) drain(rpc *grpc.Server) error {
	g.draining.Store(notReady)
	g.tellHealth()
	g.log.Info("draining: not ready any more", "delay", g.cfg.DrainDelay, "in_flight", g.inFlight.Load())
	select {
	case <-time.After(g.cfg.DrainDelay):
	case <-g.cfg.endDelay:
	}
	g.draining.Store(refusing)
	close(g.refuses) // ends streams, which would be waited for
	ctx, cancel := context.WithTimeout(context.Background(), g.cfg.DrainTime)
	defer cancel()
	ended := make(chan error, 2)
	go func() {
		if g.web != nil {
			ended <- g.web.shutdown(ctx)
			return
		}
		ended <- nil
	}()
	go func() {
		if rpc != nil {
			rpc.GracefulStop()
		}
		ended <- nil
	}()
	look := time.NewTicker(hangUpInterval)
	defer look.Stop()
	stalls := stalls{}
	for left := 2; left > 0; {
		var err error
		select {
		case err = <-ended:
			left--
		case <-ctx.Done():
			err = ctx.Err()
		case <-look.C:
			for _, l := range g.doors {
				l.endStalled(stalls)
			}
		}
		if err != nil {
			return fmt.Errorf("draining: %d requests did not finish in %v", g.inFlight.Load(), g.cfg.DrainTime)
		}
	}
	return nil
}

// stalls is how far callers had come whose requests are not whole, or who have
// not read their answers, and since when they have not gone on. A drain does not
// wait for them for long.
type stalls map[any]progress

type progress struct{ reached, since int64 }

// longer tells whether a caller has not gone on for that long.
func (s stalls) longer(patience time.Duration, caller any, reached, now int64) bool {
	p, known := s[caller]
	if !known || p.reached != reached {
		s[caller] = progress{reached, now}
		return false
	}
	return time.Duration(now-p.since) > patience
}

// endStalled ends what waits for a caller that has stopped. A gRPC connection
// on which nothing is under way but what its caller has to read has only calls
// besides whose messages are not whole, if any: its end says UNAVAILABLE to them.
// Those of HTTP are answered.
func (l *listener) endStalled(stalls stalls) {
	l.mu.Lock()
	now, patience := l.g.awake.now(), l.g.cfg.pace.stall
	var stalled []*conn
	for c := range l.conns {
		switch {
		case l.budget && c.underWay.Load() <= c.toRead.Load() && !c.heldUp():
			if stalls.longer(patience, c, c.idleSince.Load()+c.received(), now) {
				stalled = append(stalled, c)
			}
		case !l.budget && c.bodySince.Load() != 0:
			if stalls.longer(patience, c, c.bodyGot.Load()+c.unread(), now) {
				_ = c.SetReadDeadline(past)
			}
		case !l.budget && c.answerUntil.Load() != 0:
			if stalls.longer(patience, c, c.received(), now) {
				_ = c.SetDeadline(past)
			}
		default:
			delete(stalls, c)
		}
	}
	for s := range l.streams {
		switch {
		case s.bodySince.Load() != 0:
			if stalls.longer(patience, s, s.bodyGot.Load(), now) {
				s.cutBody()
			}
		case s.answerUntil.Load() != 0:
			if stalls.longer(patience, s, s.conn.received(), now) {
				s.cutAnswer()
			}
		default:
			delete(stalls, s)
		}
	}
	l.mu.Unlock()
	for _, c := range stalled {
		c.Close()
	}
}
