// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"slices"
	"strings"

	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/tensor"
)

// command makes one event happen; it says only what went wrong.
func (s *script) command(line string) {
	words, o := parse(line)
	name := ""
	if len(words) > 1 {
		name = words[1]
	}
	switch words[0] {
	case "config":
		s.policy = policy.Policy{"wait_time": "0"}
		settings, err := s.change(o)
		if err == nil {
			s.b, err = New(settings)
		}
		if err != nil {
			s.say("%v", err)
		}
	case "set":
		before := s.policy
		settings, err := s.change(o)
		if err == nil {
			err = s.b.SetPolicy(settings)
		}
		if err != nil {
			s.say("%v", err)
			s.policy = before
		}
	case "at":
		s.now = commandTime(name)
	case "clients":
		for _, c := range words[1:] {
			s.b.ClientJoined(clientID(c))
		}
	case "again":
		a := s.b.AccountOf(clientID(name))
		s.command("left " + name)
		s.b.ClientJoined(clientID(words[2]))
		s.b.Resume(s.now, clientID(words[2]), a)
	case "left":
		for _, id := range s.b.ClientLeft(clientID(name)) {
			s.say("%s cancelled", s.names[id])
		}
	case "worker":
		s.b.WorkerReady(describedWorker(name, o))
	case "gone":
		s.b.WorkerGone(workerID(name))
	case "arrive":
		s.arrive(words[1:], o)
	case "cancel":
		s.say("cancel %s: %v", name, s.b.Cancel(s.requests[name].ID))
	case "ended":
		s.b.Ended(s.requests[name].ID, Never)
	case "requeue":
		r := s.requests[name]
		r.Share, r.Avoid = shareOf(words, o)
		s.b.Requeue(s.now, r)
	case "done":
		id := BatchID(number(name))
		s.b.BatchDone(s.holders[id], id, s.now-Time(o.duration("ran")), s.now)
	case "charge":
		s.b.Charge(s.now, clientID(name), Time(o.duration("cost")))
	case "count":
		s.say("%d requests, %d rows, %d could join", s.b.Queued(), s.b.QueuedRows(), s.b.Joinable())
	default:
		panic("no such command: " + line)
	}
}

// arrive queues the named requests, all alike. A request belongs to the client
// of its first letter unless another is given.
func (s *script) arrive(names []string, o options) {
	share, avoid := shareOf(names, o)
	for _, name := range names {
		if name == "alone" {
			continue
		}
		id := slices.Index(s.names, name)
		if id < 0 {
			id = len(s.names)
			s.names = append(s.names, name)
		}
		r := Request{
			ID: RequestID(id), Client: clientID(name), Rows: max(1, o.int("rows")), Level: DefaultLevel,
			Arrived: s.now - Time(o.duration("ago")), Deadline: Never, Share: share, Avoid: avoid, Cost: o.int("cost"),
		}
		if o.has("client") {
			r.Client = clientID(o["client"])
		}
		if o.has("level") {
			r.Level = o.int("level")
		}
		if o.has("within") {
			r.Deadline = r.Arrived + Time(o.duration("within"))
		}
		if o.has("dims") {
			for i, size := range strings.Split(o["dims"], "x") {
				r.Dims[i] = uint32(number(size))
			}
		}
		s.requests[name] = r
		if err := s.b.Arrive(s.now, r); err != nil {
			s.say("arrive %s: %v", name, err)
		}
	}
}

// change takes the given keys into the policy. A model of scripts has one
// variable dimension, x.0, as large as its largest bucket.
func (s *script) change(o options) (policy.Settings, error) {
	s.policy = policy.Policy(o).Over(s.policy)
	x := tensor.Spec{Name: "x", Shape: []int{1}, Variable: []int{0}}
	if sizes := s.policy["buckets.x.0"]; sizes != "" {
		x.Shape[0] = int(number(sizes[strings.LastIndex(sizes, ",")+1:]))
	}
	return s.policy.Resolve([]tensor.Spec{x})
}

func describedWorker(name string, o options) Worker {
	w := Worker{ID: workerID(name), Share: o.int("share"), Lanes: o.int("lanes"), Depth: o.int("depth")}
	w.Paused, w.Doubted = o.has("paused"), o.has("doubted")
	switch {
	case o["pad"] == "preferred":
		w.Pad = PadPreferred
	case o.has("pad"):
		w.Pad, w.PadTo = PadFixed, o.int("pad")
	}
	return w
}

// shareOf reads how a request is tried again.
func shareOf(words []string, o options) (share int, avoid WorkerID) {
	share, avoid = o.int("share"), NoWorker
	if slices.Contains(words, "alone") {
		share = 1
	}
	if o.has("avoid") {
		avoid = workerID(o["avoid"])
	}
	return share, avoid
}

func workerID(name string) WorkerID { return WorkerID(number(strings.TrimPrefix(name, "w"))) }

func clientID(name string) ClientID { return ClientID(name[0] - 'A') }
