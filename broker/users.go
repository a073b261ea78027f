// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"cmp"
	"fmt"
	"sync"

	"github.com/ringbatch/ringbatch/broker/engine"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/status"
)

// users counts connections, models and memory, by user and process. Any goroutine may use it.
type users struct {
	limits Limits
	most   int // connections in all

	mu        sync.Mutex
	conns     int
	calls     int // of conns, the extra ones of administrators
	room      int // bytes of long requests and replies under way
	users     map[int]*account
	processes map[engine.Process]int // connections
}

type account struct {
	uid         int
	conns, room int
	has         [2]holding // ofModels, ofWeights
}

// holding is what the workers of a user have declared, or its publishers publish.
type holding struct {
	names, slots int
	bytes        int64
}

const (
	ofModels = iota
	ofWeights
)

// Limits of one user or process. 0 stands for the default.
type Limits struct {
	// UserShare is a user's percentage of max_clients, and of each ring's slots; default
	// 75 where others may connect, else 100.
	UserShare         int
	MaxProcessClients int   // connections of one process; default half of max_clients, 64 at least
	MaxUserModels     int   // models that the workers of one user have declared; default 256
	MaxUserSlots      int   // slots of these models together; default 1,048,576
	MaxUserBytes      int64 // bytes of their tensors together; default half of this machine's memory
}

func (l *Limits) fill(maxClients int, shared bool) error {
	share := 100
	if shared {
		share = 75
	}
	l.UserShare = cmp.Or(l.UserShare, share)
	l.MaxProcessClients = cmp.Or(l.MaxProcessClients, max(64, maxClients/2))
	l.MaxUserModels = cmp.Or(l.MaxUserModels, 256)
	l.MaxUserSlots = cmp.Or(l.MaxUserSlots, 1<<20)
	l.MaxUserBytes = cmp.Or(l.MaxUserBytes, memTotal()/2, 1<<40)
	if l.UserShare < 1 || l.UserShare > 100 {
		return fmt.Errorf("%w: user_share is %d, must be 1..100 percent", status.ErrInvalid, l.UserShare)
	}
	if l.MaxProcessClients < 1 || l.MaxUserModels < 1 || l.MaxUserSlots < 1 || l.MaxUserBytes < 1 {
		return fmt.Errorf("%w: limits of users and processes must be positive", status.ErrInvalid)
	}
	return nil
}

const (
	// adminCalls is how many extra connections administrators get, to call but not to attach.
	adminCalls = 8

	// The most bytes of long requests and replies under way, of all users and of one.
	roomInAll   = 32 << 20
	roomPerUser = 12 << 20
)

func newUsers(l Limits, maxClients int) *users {
	return &users{limits: l, most: maxClients, users: map[int]*account{}, processes: map[engine.Process]int{}}
}

func (u *users) account(uid int) *account {
	a := u.users[uid]
	if a == nil {
		a = &account{uid: uid}
		u.users[uid] = a
	}
	return a
}

func (u *users) dropIfEmpty(a *account) {
	if *a == (account{uid: a.uid}) {
		delete(u.users, a.uid)
	}
}

type member struct {
	users     *users
	uid       int
	process   engine.Process
	callsOnly error // why the peer may call, but not attach; nil: it may
}

func (u *users) admit(uid int, p engine.Process, may Permissions) (*member, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	var why error
	a, userMost := u.account(uid), max(1, u.most*u.limits.UserShare/100)
	switch {
	case u.conns-u.calls >= u.most:
		why = fmt.Errorf("%w: max_clients is %d", status.ErrTooManyConnections, u.most)
	case a.conns >= userMost:
		why = fmt.Errorf("%w: uid %d has %d connections, and one user may have %d (user_share is %d %% of max_clients, %d)",
			status.ErrTooManyConnections, uid, a.conns, userMost, u.limits.UserShare, u.most)
	case p != engine.Process{} && u.processes[p] >= u.limits.MaxProcessClients:
		why = fmt.Errorf("%w: this process has %d connections; max_process_clients is %d",
			status.ErrTooManyConnections, u.processes[p], u.limits.MaxProcessClients)
	}
	m := &member{users: u, uid: uid, process: p}
	if why != nil {
		if may&MayAdminister == 0 || u.calls >= adminCalls {
			u.dropIfEmpty(a)
			return nil, why
		}
		m.callsOnly = why
		u.calls++
	}
	u.conns++
	a.conns++
	if p != (engine.Process{}) {
		u.processes[p]++
	}
	return m, nil
}

func (m *member) leave() {
	u := m.users
	u.mu.Lock()
	defer u.mu.Unlock()
	u.conns--
	if m.callsOnly != nil {
		u.calls--
	}
	a := u.account(m.uid)
	a.conns--
	u.dropIfEmpty(a)
	if u.processes[m.process]--; u.processes[m.process] <= 0 {
		delete(u.processes, m.process)
	}
}

// Take takes room for a long request or reply. A user's first one may exceed the user's part.
func (m *member) Take(bytes int) bool {
	u := m.users
	u.mu.Lock()
	defer u.mu.Unlock()
	a := u.account(m.uid)
	if u.room+bytes > roomInAll && u.room > 0 || a.room+bytes > roomPerUser && a.room > 0 {
		return false
	}
	u.room += bytes
	a.room += bytes
	return true
}

func (m *member) Give(bytes int) {
	u := m.users
	u.mu.Lock()
	defer u.mu.Unlock()
	u.room -= bytes
	u.account(m.uid).room -= bytes
}

// count counts a model that a worker of this user declares, or weights that it publishes,
// or refuses them. The same limits hold for all models, and for all weights.
func (u *users) count(uid, kind, slots int, bytes int64) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	a, l, what := u.account(uid), &u.limits, [...]string{"models of its workers", "weights of its publishers"}[kind]
	h := &a.has[kind]
	refuse := func(format string, args ...any) error {
		u.dropIfEmpty(a)
		return fmt.Errorf("%w: uid %d: %s; models of the configuration do not count", status.ErrQuota, uid, fmt.Sprintf(format, args...))
	}
	switch {
	case h.names >= l.MaxUserModels:
		return refuse("there are %d %s, and max_user_models is %d", h.names, what, l.MaxUserModels)
	case slots > l.MaxUserSlots-h.slots:
		return refuse("%d slots on top of the %d that %s have; max_user_slots is %d", slots, h.slots, what, l.MaxUserSlots)
	case bytes > l.MaxUserBytes-h.bytes:
		return refuse("%d MiB on top of the %d MiB that %s have; max_user_bytes is %d", bytes>>20, h.bytes>>20, what, l.MaxUserBytes)
	}
	h.names++
	h.slots += slots
	h.bytes += bytes
	return nil
}

func (u *users) uncount(uid, kind, slots int, bytes int64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	a := u.account(uid)
	h := &a.has[kind]
	h.names--
	h.slots -= slots
	h.bytes -= bytes
	u.dropIfEmpty(a)
}

var _ control.Room = (*member)(nil)
