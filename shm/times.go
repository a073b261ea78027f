// SPDX-License-Identifier: Apache-2.0

package shm

import "sync/atomic"

// Times are times of a request that only the client knows. The client writes them while
// the broker records the model; unknown times are 0.
type Times struct {
	Gen     uint32
	_       uint32
	Asked   int64        // start of Claim
	Claimed int64        // end of Claim
	Woken   atomic.Int64 // when the client saw the end; until then, the value of an earlier request
	_       [32]byte     // one cache line each: the broker reads one while the client writes the other
}

// recordWords say whether the broker records a client's model.
type recordWords struct {
	// Written by the broker.
	Recording atomic.Uint32 // 1: the client writes Times
	_         [60]byte
}

const recordWordsAt = 192

// ClientTimes are the times of a window's requests, two for each slot. The broker reads
// the times of one generation when it takes the next commit of that slot; by then the
// client has written the times of the next generation. The zero value is for peers
// without times.
type ClientTimes struct {
	words *recordWords
	times []Times
}

// NewClientTimes views a client's session that has times.
func NewClientTimes(s *Segment, window int) ClientTimes {
	return ClientTimes{at[recordWords](s.mem, recordWordsAt), array[Times](s.mem, timesAt(window), 2*window)}
}

// Wanted reports, to the client, whether the broker records.
func (t *ClientTimes) Wanted() bool { return t.words != nil && t.words.Recording.Load() != 0 }

// Want switches recording on or off. Only the broker calls it.
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

// Of are the times of one generation of the request that begins at a slot of the window.
// The client writes all but Woken before it pushes the commit.
func (t *ClientTimes) Of(at, gen uint32) *Times { return &t.times[2*at+gen&1] }

// Read copies the times for the broker. It returns false if the client has written none.
func (t *ClientTimes) Read(at, gen uint32) (asked, claimed, woken int64, ok bool) {
	if t.words == nil {
		return 0, 0, 0, false
	}
	e := t.Of(at, gen)
	return e.Asked, e.Claimed, e.Woken.Load(), e.Gen == gen
}
