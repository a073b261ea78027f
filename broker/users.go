// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"fmt"
	"sync"

	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/status"
)

// users shares the broker out: what each user, and each process, has of it.
// Any goroutine may use it; nothing of it waits.
type users struct {
	limits Limits
	most   int // connections in all

	mu        sync.Mutex
	conns     int
	calls     int // of conns, those that only administrators get
	room      int // bytes of long requests and replies under way
	users     map[int]*account
	processes map[process]int // connections
}

// account is what one user has.
type account struct {
	uid                  int
	conns, models, slots int
	bytes                int64
	room                 int
}

// Limits are how much of the broker one user or process may have. 0 stands for
// the default.
type Limits struct {
	UserShare         int   // percent of max_clients, and of each ring's slots, that one user may have; default 75 where others may connect, else 100
	MaxProcessClients int   // connections of one process; default half of max_clients, 64 at least
	MaxUserModels     int   // models that the workers of one user have declared; default 256
	MaxUserSlots      int   // slots of all of these together; default 1,048,576
	MaxUserBytes      int64 // bytes of their tensors together; default half of this machine's memory
}

func (l *Limits) fill(maxClients int, shared bool) error {
	set := func(field *int, value int) {
		if *field == 0 {
			*field = value
		}
	}
	share := 100
	if shared {
		share = 75
	}
	set(&l.UserShare, share)
	set(&l.MaxProcessClients, max(64, maxClients/2))
	set(&l.MaxUserModels, 256)
	set(&l.MaxUserSlots, 1<<20)
	if l.MaxUserBytes == 0 {
		if l.MaxUserBytes = memTotal() / 2; l.MaxUserBytes <= 0 {
			l.MaxUserBytes = 1 << 40
		}
	}
	if l.UserShare < 1 || l.UserShare > 100 {
		return fmt.Errorf("%w: user_share is %d, must be 1..100 percent", status.ErrInvalid, l.UserShare)
	}
	if l.MaxProcessClients < 1 || l.MaxUserModels < 1 || l.MaxUserSlots < 1 || l.MaxUserBytes < 1 {
		return fmt.Errorf("%w: limits of users and processes must be positive", status.ErrInvalid)
	}
	return nil
}

const (
	// adminCalls is how many connections beyond max_clients administrators get,
	// to see and change what is wrong; not to attach.
	adminCalls = 8

	// Of requests and replies that are longer than a few kilobytes and under
	// way: those of all users, and those of one.
	roomInAll   = 32 << 20
	roomPerUser = 12 << 20
)

func newUsers(l Limits, maxClients int) *users {
	return &users{limits: l, most: maxClients, users: map[int]*account{}, processes: map[process]int{}}
}

// share is one user's part of what there is n of.
func (l *Limits) share(n int) int { return max(1, n*l.UserShare/100) }

func (u *users) account(uid int) *account {
	a := u.users[uid]
	if a == nil {
		a = &account{uid: uid}
		u.users[uid] = a
	}
	return a
}

// settle forgets an account that has nothing.
func (u *users) settle(a *account) {
	if *a == (account{uid: a.uid}) {
		delete(u.users, a.uid)
	}
}

// member is a connection that is counted.
type member struct {
	users   *users
	uid     int
	process process
	calls   error // not nil: it may call, not attach, for this reason
}

// enter counts a connection, or says why there is no room for it.
func (u *users) enter(uid int, p process, may Permissions) (*member, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	var why error
	a, userMost := u.account(uid), u.limits.share(u.most)
	switch {
	case u.conns-u.calls >= u.most:
		why = fmt.Errorf("%w: max_clients is %d", status.ErrTooManyConnections, u.most)
	case a.conns >= userMost:
		why = fmt.Errorf("%w: uid %d has %d connections, and one user may have %d (user_share is %d %% of max_clients, %d)", status.ErrTooManyConnections, uid, a.conns, userMost, u.limits.UserShare, u.most)
	case p != process{} && u.processes[p] >= u.limits.MaxProcessClients:
		why = fmt.Errorf("%w: this process has %d connections; max_process_clients is %d", status.ErrTooManyConnections, u.processes[p], u.limits.MaxProcessClients)
	}
	m := &member{users: u, uid: uid, process: p}
	if why != nil {
		if may&MayAdminister == 0 || u.calls >= adminCalls {
			u.settle(a)
			return nil, why
		}
		m.calls = why
		u.calls++
	}
	u.conns++
	a.conns++
	if p != (process{}) {
		u.processes[p]++
	}
	return m, nil
}

// leave ends what enter began.
func (m *member) leave() {
	u := m.users
	u.mu.Lock()
	defer u.mu.Unlock()
	u.conns--
	if m.calls != nil {
		u.calls--
	}
	a := u.account(m.uid)
	a.conns--
	u.settle(a)
	if u.processes[m.process]--; u.processes[m.process] <= 0 {
		delete(u.processes, m.process)
	}
}

// Take and Give are the room for long requests and replies. A peer that has none of
// it gets what it needs, if only others leave that much: a reply may be longer
// than a user's part.
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

// declare counts a model that a worker of this user declares.
func (u *users) declare(uid, slots int, bytes int64) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	a, l := u.account(uid), &u.limits
	refuse := func(format string, args ...any) error {
		u.settle(a)
		return fmt.Errorf("%w: uid %d: %s; models of the configuration do not count", status.ErrQuota, uid, fmt.Sprintf(format, args...))
	}
	switch {
	case a.models >= l.MaxUserModels:
		return refuse("its workers have declared %d models, and max_user_models is %d", a.models, l.MaxUserModels)
	case slots > l.MaxUserSlots-a.slots:
		return refuse("%d slots on top of the %d that its workers' models have; max_user_slots is %d", slots, a.slots, l.MaxUserSlots)
	case bytes > l.MaxUserBytes-a.bytes:
		return refuse("%d MiB on top of the %d MiB that its workers' models have; max_user_bytes is %d", bytes>>20, a.bytes>>20, l.MaxUserBytes)
	}
	a.models++
	a.slots += slots
	a.bytes += bytes
	return nil
}

// undeclare ends what declare began.
func (u *users) undeclare(uid, slots int, bytes int64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	a := u.account(uid)
	a.models--
	a.slots -= slots
	a.bytes -= bytes
	u.settle(a)
}

var _ control.Room = (*member)(nil)
