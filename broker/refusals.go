// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"net"
	"sync"
	"time"

	"github.com/ringbatch/ringbatch/internal/control"
)

// refusals turns connections away at little cost. A user who is refused gets
// refusalsAtOnce answers in refusalTime at once. Further connections wait, up to
// refusalsHeld of them, and are answered when the time is over: a program that
// tries again when it is refused is slowed down by that. Beyond those they are
// closed without a word.
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
	refusalUsers   = 256 // that are told apart; the rest is closed
)

// turnAway answers and closes a connection, now or later.
func (r *refusals) turnAway(c *net.UnixConn, uid uint32, reply func() *control.Reply) {
	r.mu.Lock()
	u := r.users[uid]
	if u == nil && len(r.users) < refusalUsers {
		if r.users == nil {
			r.users = map[uint32]*refused{}
		}
		u = &refused{}
		r.users[uid] = u
		time.AfterFunc(refusalTime, func() { r.over(uid, reply) })
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

// over ends a user's time.
func (r *refusals) over(uid uint32, reply func() *control.Reply) {
	r.mu.Lock()
	held := r.users[uid].held
	delete(r.users, uid)
	r.mu.Unlock()
	for _, c := range held {
		answerAndClose(c, reply())
	}
}

// close gives up those that wait.
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
