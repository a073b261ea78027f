// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"maps"
	"net"
	"sync"
	"time"

	"github.com/ringbatch/ringbatch/broker/engine"
	"github.com/ringbatch/ringbatch/internal/control"
)

// refusals refuses connections at little cost. A user gets refusalsAtOnce answers in
// refusalTime at once. Up to refusalsHeld further connections are answered after that
// time, which slows down a program that tries again. The rest is closed without answer.
type refusals struct {
	mu    sync.Mutex
	users map[uint32]*refused
}

type refused struct {
	answered int
	held     []*net.UnixConn
}

const (
	refusalsAtOnce = 20
	refusalsHeld   = 20
	refusalTime    = time.Second
	refusalUsers   = 256 // at once; connections of others are closed
)

func (r *refusals) refuseConn(c *net.UnixConn, uid uint32, reply func() *control.Reply) {
	r.mu.Lock()
	u := r.users[uid]
	if u == nil && len(r.users) < refusalUsers {
		u = &refused{}
		r.users[uid] = u
		time.AfterFunc(refusalTime, func() { r.answerHeld(uid, reply) })
	}
	switch {
	case u == nil || u.answered >= refusalsAtOnce && len(u.held) >= refusalsHeld:
		r.mu.Unlock()
		_ = c.Close()
	case u.answered < refusalsAtOnce:
		u.answered++
		r.mu.Unlock()
		answerAndClose(c, reply())
	default:
		u.held = append(u.held, c)
		r.mu.Unlock()
	}
}

func (r *refusals) answerHeld(uid uint32, reply func() *control.Reply) {
	r.mu.Lock()
	held := r.users[uid].held
	delete(r.users, uid)
	r.mu.Unlock()
	for _, c := range held {
		answerAndClose(c, reply())
	}
}

// close closes the connections that wait for an answer.
func (r *refusals) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, u := range r.users {
		for _, c := range u.held {
			_ = c.Close()
		}
		u.held = nil
	}
}

// answerAndClose does not wait: an answer fits into the socket's empty buffer.
func answerAndClose(c *net.UnixConn, rep *control.Reply) {
	_ = control.Send(c, time.Now().Add(replyTime), rep)
	_ = c.Close()
}

// offenders remembers, for a while, the processes that broke the protocol. They have to
// wait before they attach again, so that they do not keep the broker from its work.
type offenders struct {
	mu   sync.Mutex
	last map[engine.Process]time.Time
}

const (
	offenderMemory = 5 * time.Second
	offenderPause  = 100 * time.Millisecond
)

func (o *offenders) add(p engine.Process) {
	if p == (engine.Process{}) { // unknown: other processes look alike
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	now := time.Now()
	maps.DeleteFunc(o.last, func(_ engine.Process, t time.Time) bool { return now.Sub(t) > offenderMemory })
	o.last[p] = now
}

// pauseOf is how long a process has to wait before it attaches.
func (o *offenders) pauseOf(p engine.Process) time.Duration {
	o.mu.Lock()
	defer o.mu.Unlock()
	if t, ok := o.last[p]; ok && time.Since(t) <= offenderMemory {
		return offenderPause
	}
	return 0
}
