package batcher

import (
	"fmt"
	"slices"
	"strings"
	"time"
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
		s.cfg = Config{}
		s.change(o)
		b, err := New(s.cfg)
		if err != nil {
			s.say("%v", err)
			return
		}
		s.b = b
	case "set":
		before := s.cfg.clone()
		s.change(o)
		if err := s.b.SetConfig(s.cfg); err != nil {
			s.say("%v", err)
			s.cfg = before
		}
	case "at":
		s.now = commandTime(name)
	case "clients":
		for _, c := range words[1:] {
			s.b.ClientJoined(clientID(c))
		}
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
		s.b.Ended(s.requests[name].ID)
	case "requeue":
		r := s.requests[name]
		r.Alone = slices.Contains(words, "alone")
		s.b.Requeue(s.now, r)
	case "done":
		id := BatchID(number(name))
		s.b.BatchDone(s.holders[id], id)
	case "count":
		s.say("%d requests, %d rows, %d could join", s.b.Queued(), s.b.QueuedRows(), s.b.Joinable())
	default:
		panic("no such command: " + line)
	}
}

// arrive queues the named requests, all alike. A request belongs to the client
// of its first letter unless another is given.
func (s *script) arrive(names []string, o options) {
	alone := slices.Contains(names, "alone")
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
			Arrived: s.now - Time(o.duration("ago")), Deadline: Never, Alone: alone,
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

// change applies the given options to the configuration.
func (s *script) change(o options) {
	c := &s.cfg
	for key, value := range o {
		switch key {
		case "max":
			c.MaxBatchSize = o.int(key)
		case "wait":
			c.WaitTime = o.duration(key)
		case "prefer":
			c.PreferredSizes = nil
			for _, n := range o.numbers(key) {
				c.PreferredSizes = append(c.PreferredSizes, int(n))
			}
		case "levels":
			c.Levels = append(c.Levels, make([]LevelPolicy, o.int(key))...)[:o.int(key)]
		case "default_level":
			c.DefaultLevel = o.int(key)
		case "ageing":
			c.Ageing = o.duration(key)
		case "preserve_order":
			c.PreserveOrder = value == "yes"
		case "buckets": // of the first dimension
			c.Buckets = [][]uint32{nil}
			for _, n := range o.numbers(key) {
				c.Buckets[0] = append(c.Buckets[0], uint32(n))
			}
		default:
			if !strings.HasPrefix(key, "level") {
				panic("no such option: " + key)
			}
		}
	}
	for i := range c.Levels { // level0=max_queue:3,timeout:5ms,max_timeout:9ms,delay
		for _, word := range strings.Split(o[fmt.Sprintf("level%d", i)], ",") {
			key, value, _ := strings.Cut(word, ":")
			l := &c.Levels[i]
			switch key {
			case "max_queue":
				l.MaxQueue = int(number(value))
			case "timeout":
				l.DefaultTimeout, _ = time.ParseDuration(value)
			case "max_timeout":
				l.MaxTimeout, _ = time.ParseDuration(value)
			case "delay":
				l.OnTimeout = Delay
			case "reject":
				l.OnTimeout = Reject
			}
		}
	}
}

func describedWorker(name string, o options) Worker {
	w := Worker{ID: workerID(name), Weight: o.int("weight"), MaxInFlight: o.int("in_flight")}
	switch {
	case o["pad"] == "preferred":
		w.Pad = PadPreferred
	case o.has("pad"):
		w.Pad, w.PadTo = PadFixed, o.int("pad")
	}
	return w
}

func workerID(name string) WorkerID { return WorkerID(number(strings.TrimPrefix(name, "w"))) }

func clientID(name string) ClientID { return ClientID(name[0] - 'A') }
