// SPDX-License-Identifier: Apache-2.0

package batcher

import "slices"

// Which requests of a replay wait for which answers.

// seeFeedback gathers the feedback of the window.
func (p *replay) seeFeedback() *feedback {
	f := &p.feedback
	*f = feedback{gaps: f.gaps[:0], rests: f.rests[:0]}
	for _, first := range p.first {
		answer := -p.answersTo(first)
		before := first
		for i := first; i >= 0 && len(f.gaps) < maxFeedback; i, answer = p.follow[i], answer+1 {
			if answer < 0 {
				continue
			}
			r := &p.window[before]
			before = p.follow[before]
			if answer < len(p.ends) && r.skipped == p.window[i].skipped { // a pause tells nothing
				f.add(float64(p.window[i].arrived-r.arrived), float64(p.ends[answer]-r.arrived))
			}
		}
	}
	return f
}

// answersTo finds when a client was answered, in order (ends), and how many requests
// it had in flight at most.
func (p *replay) answersTo(first int32) (most int) {
	most = 1
	p.ends = p.ends[:0]
	for i := first; i >= 0; i = p.follow[i] {
		r := &p.window[i]
		most = max(most, int(r.sent-r.answered)+1)
		if r.latency > 0 {
			p.ends = append(p.ends, r.arrived+r.latency)
		}
	}
	slices.Sort(p.ends)
	return most
}

// takeAtOnce has requests that were refused at first come when they came first.
func (p *replay) takeAtOnce() {
	for i := range p.window {
		r := &p.window[i]
		r.arrived -= r.refused
		if r.latency > 0 {
			r.latency += r.refused
		}
	}
}

// followAnswers finds the answer that each request waited for, of clients that
// keep up to k requests in flight and send one more for each answer: the n-th
// request waited for answer n-k. A record only knows how many had come by then: if
// that counted, requests that happened to be answered together once would stay
// together, whatever the wait is.
func (p *replay) followAnswers() {
	for _, first := range p.first {
		most := p.answersTo(first)
		if most == 1 || p.sendsInGroups(first, most) {
			continue
		}
		sentFirst := p.window[first].sent
		for i := first; i >= 0; i = p.follow[i] {
			r := &p.window[i]
			after := int(r.sent) + 1 - most - int(sentFirst) // of the answers in the window, from 1
			if after > len(p.ends) {
				continue
			}
			r.follows, r.answered = true, sentFirst
			if after > 0 {
				r.answered += uint32(after)
				r.sinceAnswer = max(0, r.arrived-p.ends[after-1])
			}
		}
	}
}

// sendsInGroups says whether a client sends several requests when all of the last
// ones are answered: it never sent upon an answer while others were missing,
// though they did not come all at once.
func (p *replay) sendsInGroups(first int32, most int) bool {
	apart := false
	for i := first; i >= 0; i = p.follow[i] {
		r := &p.window[i]
		if !r.follows {
			continue
		}
		if r.sent > r.answered {
			return false
		}
		n := int(r.answered) - int(p.window[first].sent)
		apart = apart || n >= most && n <= len(p.ends) && p.ends[n-1]-p.ends[n-most] > r.sinceAnswer
	}
	return apart
}

// schedule sets when a client's next request comes, if that is known.
func (p *replay) schedule(i int) {
	c := &p.clients[i]
	if c.next < 0 {
		return
	}
	r := &p.window[c.next]
	at := p.start + r.arrived - p.window[0].arrived
	after := int32(r.answered - c.sentFirst) // answers since the window began, to what it has
	if p.closed && r.sent != c.sentFirst {
		if r.follows && after > 0 {
			if c.waits = int32(c.answered) < after; c.waits {
				return
			}
			at = p.answers[p.answersOf[i]+after-1] + r.sinceAnswer
		} else if !r.follows {
			at = c.sentAt + r.sinceSend
		}
	}
	p.arrivals.set(uint32(i), int64(max(at+p.lag, p.now)), int64(c.next))
}

// answer notes that a client is answered.
func (p *replay) answer(i int, at Time) {
	c := &p.clients[i]
	p.answers[p.answersOf[i]+int32(c.answered)] = at
	c.answered++
}
