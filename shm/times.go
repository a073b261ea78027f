// SPDX-License-Identifier: Apache-2.0

package shm

import "sync/atomic"

// Times is what a client tells of one of its requests while its model is
// recorded: only it knows them. Those that it does not know are 0.
type Times struct {
	Gen     uint32
	_       uint32
	Asked   int64        // when it began to look for slots
	Claimed int64        // when it had them
	Woken   atomic.Int64 // when it saw the request's end; before that, what an earlier request had
	_       [32]byte     // a line for each: the broker reads the one while the client writes the other
}

// recordWords tell a client whether its model is recorded.
type recordWords struct {
	// Written by the broker.
	Recording atomic.Uint32 // 1: tell your times
	_         [60]byte
}

const recordWordsAt = 192

// ClientTimes are the times of a window's requests, two for each slot: the
// broker reads those of one generation when it takes the commit of the next one
// there, and by then the client has written that one's beside it. The zero value
// is that of a client, or a broker, that does not know of them.
type ClientTimes struct {
	words *recordWords
	times []Times
}

// NewClientTimes views a client's session that has them.
func NewClientTimes(s *Segment, window int) ClientTimes {
	return ClientTimes{at[recordWords](s.mem, recordWordsAt), array[Times](s.mem, timesAt(window), 2*window)}
}

// Wanted is the client's question before it claims.
func (t *ClientTimes) Wanted() bool { return t.words != nil && t.words.Recording.Load() != 0 }

// Want is the broker's answer to it.
func (t *ClientTimes) Want(on bool) {
	if t.words == nil {
		return
	}
	word := uint32(0)
	if on {
		word = 1
	}
	t.words.Recording.Store(word)
}

// Of are the times of one generation of the request that begins at a slot of the
// window. The client writes all but Woken before it pushes the commit.
func (t *ClientTimes) Of(at, gen uint32) *Times { return &t.times[2*at+gen&1] }

// Read copies them for the broker; false if the client has told none.
func (t *ClientTimes) Read(at, gen uint32) (asked, claimed, woken int64, ok bool) {
	if t.words == nil {
		return 0, 0, 0, false
	}
	e := t.Of(at, gen)
	return e.Asked, e.Claimed, e.Woken.Load(), e.Gen == gen
}
