package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/stats"
)

// host is a broker with its workers and honest clients, as processes.
type host struct {
	r        *run
	brokerOf role
	broker   *process
	log      journal

	mu      sync.Mutex
	workers []*process
	loads   []*process
	closed  bool
}

// journal keeps what the broker logged, by message and process.
type journal struct {
	mu   sync.Mutex
	cond *sync.Cond
	when map[entryKey]time.Time
	all  map[string]int
}

type entryKey struct {
	msg string
	pid int
}

func (j *journal) read(line []byte) {
	var e struct {
		Time time.Time
		Msg  string
		Pid  int
	}
	if json.Unmarshal(line, &e) != nil {
		fmt.Printf("   broker: %s\n", line) // a panic, most likely
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.when[entryKey{e.Msg, e.Pid}] = e.Time
	j.all[e.Msg]++
	j.cond.Broadcast()
}

func (j *journal) count(msg string) int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.all[msg]
}

// wait waits until the broker has logged msg about pid, and says when it did.
func (j *journal) wait(msg string, pid int, d time.Duration) (time.Time, bool) {
	timer := time.AfterFunc(d, func() { j.mu.Lock(); j.cond.Broadcast(); j.mu.Unlock() })
	defer timer.Stop()
	end := time.Now().Add(d)
	j.mu.Lock()
	defer j.mu.Unlock()
	for {
		if t, ok := j.when[entryKey{msg, pid}]; ok {
			return t, true
		}
		if time.Now().After(end) {
			return time.Time{}, false
		}
		j.cond.Wait()
	}
}

// start makes a host with a broker and some workers that live.
func (r *run) startHost(ro role, workers int) (*host, error) {
	ro.Kind, ro.Socket = "broker", r.socket()
	if ro.Lease == 0 {
		ro.Lease = 10_000
	}
	h := &host{r: r, brokerOf: ro, log: journal{when: map[entryKey]time.Time{}, all: map[string]int{}}}
	h.log.cond = sync.NewCond(&h.log.mu)
	r.host = h
	if err := h.startBroker(); err != nil {
		return nil, err
	}
	for range workers {
		w, err := h.worker(role{})
		if err != nil {
			return nil, err
		}
		if !w.said("attached", 10*time.Second) {
			return nil, fmt.Errorf("worker does not attach: %s", w.last())
		}
	}
	return h, nil
}

func (h *host) startBroker() (err error) {
	if h.broker, err = spawn(h.brokerOf, h.log.read, nil); err != nil {
		return err
	}
	if !h.broker.said("listening", 10*time.Second) {
		return fmt.Errorf("broker does not listen: %s", h.broker.last())
	}
	return nil
}

// worker starts one more worker.
func (h *host) worker(ro role) (*process, error) {
	ro.Kind, ro.Socket = "worker", h.r.socket()
	p, err := spawn(ro, func([]byte) {}, nil)
	if err == nil {
		h.mu.Lock()
		h.workers = append(h.workers, p)
		h.mu.Unlock()
	}
	return p, err
}

// keepWorkers has n workers at all times, until stop is called: for each that
// dies it starts another.
func (h *host) keepWorkers(n int) (stop func()) {
	stopping, ended := make(chan struct{}), make(chan struct{})
	for range n {
		go func() {
			defer func() { ended <- struct{}{} }()
			for {
				p, err := h.worker(role{})
				if err != nil {
					h.r.fail("worker: %v", err)
					return
				}
				select {
				case <-p.ended:
					_ = p.stdin.Close()
				case <-stopping:
					p.end()
					return
				}
			}
		}()
	}
	return func() {
		close(stopping)
		for range n {
			<-ended
		}
	}
}

// load starts a process of honest clients.
func (h *host) load(ro role) error {
	ro.Kind, ro.Socket = "load", h.r.socket()
	ro.Seed = h.r.seed()
	p, err := spawn(ro, nil, nil)
	if err != nil {
		return err
	}
	h.mu.Lock()
	h.loads = append(h.loads, p)
	h.mu.Unlock()
	for end := time.Now().Add(10 * time.Second); p.last() == ""; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			return fmt.Errorf("load does not start")
		}
	}
	return nil
}

func (p *process) tally() (t tally) {
	_ = json.Unmarshal([]byte(p.last()), &t)
	return t
}

// endLoads stops the honest clients and checks what they saw. allowed are the
// named errors that this campaign may cause.
func (h *host) endLoads(allowed ...string) (sum tally) {
	r := h.r
	sum.Named = map[string]int{}
	h.mu.Lock()
	loads := h.loads
	h.loads = nil
	h.mu.Unlock()
	for _, p := range loads {
		p.end()
		t := p.tally()
		sum.OK += t.OK
		sum.Stood = max(sum.Stood, t.Stood)
		sum.Poisoned += t.Poisoned
		for name, n := range t.Named {
			sum.Named[name] += n
		}
		r.check(t.OK > 0, "a load got no answer at all: %s", p.last())
		for _, w := range append(t.Wrong, t.Late...) {
			r.fail("load: %s", w)
		}
	}
	if sum.Stood > patience {
		allowed = append(allowed, "Expired")
	}
	for name, n := range sum.Named {
		r.check(strings.Contains(","+strings.Join(allowed, ",")+",", ","+name+","), "%d honest requests ended with %s", n, name)
	}
	fmt.Printf("   honest requests: %d right, %v", sum.OK, sum.Named)
	if sum.Poisoned > 0 {
		fmt.Printf(", %d poisonous", sum.Poisoned)
	}
	if sum.Stood > 0 {
		fmt.Printf("; the machine stood still for %v", sum.Stood.Round(time.Millisecond))
	}
	fmt.Println()
	return sum
}

// stats asks the broker.
func (h *host) stats() (stats.Model, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	s, err := admin.New(h.r.socket()).Stats(ctx)
	if err != nil {
		return stats.Model{}, err
	}
	if len(s.Models) != 1 {
		return stats.Model{}, fmt.Errorf("statistics of %d models", len(s.Models))
	}
	return s.Models[0], nil
}

// settled checks, when all clients are gone, that the broker's books are
// empty and that it has as many descriptors as at first.
func (h *host) settled(before vitals) {
	r := h.r
	var s stats.Model
	var err error
	var now vitals
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		s, err = h.stats()
		now = vitalsOf(h.broker.pid())
		if err == nil && s.SlotsFree == slots && s.QueueLength == 0 && s.Clients == 0 && now.fds <= before.fds+6*(len(s.Workers)+1) {
			break
		}
	}
	if err != nil {
		r.fail("statistics: %v", err)
		return
	}
	ended := uint64(0)
	for _, n := range s.Ended {
		ended += n
	}
	r.check(s.SlotsFree == slots, "%d of %d slots are free at the end", s.SlotsFree, slots)
	r.check(s.QueueLength == 0 && s.Clients == 0, "%d queued, %d clients at the end", s.QueueLength, s.Clients)
	r.check(ended == s.Requests, "%d requests were accepted, %d ended", s.Requests, ended)
	r.check(now.fds <= before.fds+6*(len(s.Workers)+1), "broker has %d descriptors, %d at first", now.fds, before.fds)
	r.check(now.threads <= before.threads+16, "broker has %d threads, %d at first", now.threads, before.threads)
	fmt.Printf("   broker at the end: %d requests, %d batches, %d requeued; fds %d → %d, threads %d → %d, RSS %d → %d MiB\n",
		s.Requests, s.Batches, s.Requeued, before.fds, now.fds, before.threads, now.threads, before.rss>>20, now.rss>>20)
}

// vitals are what a process uses.
type vitals struct {
	fds, threads int
	rss          int64
}

func vitalsOf(pid int) (v vitals) {
	if list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid)); err == nil {
		v.fds = len(list)
	}
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for _, line := range strings.Split(string(status), "\n") {
		if n, _ := fmt.Sscanf(line, "Threads: %d", &v.threads); n == 1 {
			continue
		}
		if n, _ := fmt.Sscanf(line, "VmRSS: %d kB", &v.rss); n == 1 {
			v.rss <<= 10
		}
	}
	return v
}

func (h *host) close() {
	h.mu.Lock()
	h.closed = true
	all := append(append([]*process(nil), h.loads...), h.workers...)
	h.mu.Unlock()
	for _, p := range append(all, h.broker) {
		if p != nil {
			p.end()
		}
	}
}
