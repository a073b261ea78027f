// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"slices"
	"time"
)

// Rule 13: what a client's failures cost the workers counts against its turn.
//
//	              it cost the workers more than credit/amends
//	in good standing ─────────────────────► in debt: alone, in its turn, after the others
//	        ▲                                  │
//	        └────── credit after its turn, without another failure
//
// The account is one point in time, client.paid. Each failure moves it on by amends times
// what the failure cost. A debt is more than credit, and ends when all is paid.
const (
	amends = 8 // the others get the workers for that many times what a failure cost
	credit = Time(time.Second / 2)

	// Suspicion is a cost that brings a client into debt at once.
	Suspicion = credit/amends + 1
)

// Account is what a client's failures cost.
type Account struct {
	paid Time // when all is paid
	cost Time // of the last failure
}

// IsPaid says that nothing is left to pay.
func (a Account) IsPaid(now Time) bool { return a.paid <= now }

// Charged is the account after a failure of a client that has left.
func (a Account) Charged(now, cost Time) Account { return a.charged(now, cost, credit) }

func (a Account) charged(now, cost, credit Time) Account {
	wait := amends * cost
	if wait <= 0 {
		return a
	}
	return Account{min(max(a.paid, now)+wait, now+credit+max(credit, wait)), cost}
}

// IsWorse says that a is paid later than x.
func (a Account) IsWorse(x Account) bool { return a.paid > x.paid }

// AccountOf is the account of a client.
func (b *Batcher) AccountOf(id ClientID) Account { return b.client(id).Account }

// Resume gives a client that has joined the account of its earlier session.
func (b *Batcher) Resume(now Time, id ClientID, a Account) {
	b.client(id).Account = a
	b.Charge(now, id, 0)
}

// Charge reports what a failed batch, or a worker's death, cost because of a client. A client
// that has left does not pay here: see Charged.
func (b *Batcher) Charge(now Time, id ClientID, cost Time) {
	c := b.client(id)
	if !c.joined {
		return
	}
	c.Account = c.charged(now, cost, b.credit)
	if !c.owes && c.paid > now+b.credit {
		before := c.couldJoin()
		c.owes = true
		b.countJoinable(before, c.couldJoin())
		b.debtors = append(b.debtors, id)
		b.withhold(c)
	}
}

// Owes says whether a client is in debt.
func (b *Batcher) Owes(id ClientID) bool { return b.client(id).owes }

// withhold takes the waiting requests of a client out of the queues.
func (b *Batcher) withhold(c *client) {
	if b.settings.PreserveOrder {
		b.hold(c)
	}
	for id := c.waiting.head; id != none; id = b.byClient[id].next {
		if r := &b.requests[id]; !r.held {
			b.leave(id)
			r.held = true
		}
		b.countOwed(&b.requests[id], 1)
	}
}

// countOwed counts a withheld request n times. It takes no place in its level's queue.
func (b *Batcher) countOwed(r *request, n int) {
	r.owed = n > 0
	b.owed.Requests += n
	b.owed.Rows += n * int(r.rows)
	b.owed.Cost += n * int(r.cost)
	b.queuedAt[r.level] -= n
}

// forgiveDebts lets clients that have paid join the others again, behind all that wait.
func (b *Batcher) forgiveDebts(now Time) {
	for i := len(b.debtors) - 1; i >= 0; i-- {
		c := &b.clients[b.debtors[i]]
		if c.paid > now {
			continue
		}
		b.forgive(c, i)
		for id := c.waiting.head; id != none; id = b.byClient[id].next {
			r := &b.requests[id]
			b.countOwed(r, -1)
			if !b.settings.PreserveOrder {
				b.lastSeq++
				r.held, r.seq, r.since = false, b.lastSeq, b.lastSince
				b.enter(id)
			}
		}
		b.release(c)
	}
}

// forgive ends the debt of the client at that place of the list.
func (b *Batcher) forgive(c *client, place int) {
	before := c.couldJoin()
	c.owes = false
	b.countJoinable(before, c.couldJoin())
	b.debtors = slices.Delete(b.debtors, place, place+1)
}

// turnOf is when a client in debt may have its next batch: amends times what it cost after its
// last failure, or when the others have sent nothing for as long as a failure costs.
func (b *Batcher) turnOf(c *client) Time {
	quiet := b.lastGood + c.cost
	switch {
	case c.running == 0:
		return min(quiet, c.paid-b.credit)
	case b.settings.PreserveOrder:
		return Never
	}
	return quiet
}

// feedDebtor gives an idle worker a batch of a client in debt whose turn has come.
func (b *Batcher) feedDebtor(now Time) bool {
	best, w, paid := none, NoWorker, Never
	for _, id := range b.debtors {
		c := &b.clients[id]
		if c.waiting.head == none || c.paid >= paid || b.turnOf(c) > now {
			continue
		}
		if x, _ := b.idleFor(c.waiting.head); x != NoWorker {
			best, w, paid = c.waiting.head, x, c.paid
		}
	}
	if best == none {
		return false
	}
	b.dispatchFrom(b.byClient, w, best, now)
	return true
}

// nextDebt is when Decide must look at debts again.
func (b *Batcher) nextDebt(now Time) Time {
	at := Never
	for _, id := range b.debtors {
		c := &b.clients[id]
		if c.waiting.head == none {
			continue
		}
		at = min(at, c.paid)
		if turn := b.turnOf(c); turn > now {
			at = min(at, turn)
		}
	}
	return at
}
