// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/balancer"

	"github.com/ringbatch/ringbatch/gateway/oip"
)

// hosts are the addresses of the target, and what is known of each.
type hosts struct {
	log      *slog.Logger
	inFlight int                          // most batches at once, of all hosts
	check    func(context.Context, *host) // runs while a host is connected
	onLanes  func(int)                    // how many batches are welcome has changed

	mu      sync.Mutex // guards what follows, and the fields of every host
	all     []*host    // by name
	turn    int        // for ties
	changed chan struct{}
	why     string // the target could not be resolved
	lanes   int
}

// host is one address.
//
//	           connected          check: well            a call is lost, check fails
//	connecting ─────────► unknown ───────────► usable ─────────────────────► left ─┐
//	    ▲                                        ▲        check: well              │
//	    └──── disconnected, from anywhere ───────┴─────────────────────────────────┘
type host struct {
	hosts *hosts
	name  string

	sub    balancer.SubConn // nil while it is not connected
	cancel context.CancelFunc
	usable bool
	said   string // why it is not, as it was logged

	inFlight int
	window   float64 // batches that it may have in flight
	calls    map[*call]struct{}

	plain    bool      // no ringbatch gateway: a batch fails as a whole
	maxBatch int       // rows
	maxBytes int       // of a message's tensors; 0: none was too large for it yet
	learned  time.Time // when maxBytes was
}

func newHosts(log *slog.Logger, inFlight int) *hosts {
	return &hosts{
		log: log, inFlight: inFlight, changed: make(chan struct{}), check: func(context.Context, *host) {}, onLanes: func(int) {},
		turn: rand.IntN(1 << 16), // relays that begin at the same host would go round in step
	}
}

// Windows: what a host may have in flight before it has reported anything, and
// how far that goes.
const (
	firstWindow = 2
	leastWindow = 1
)

// add knows a new address.
func (p *hosts) add(name string) *host {
	p.mu.Lock()
	defer p.mu.Unlock()
	h := &host{hosts: p, name: name, window: firstWindow, calls: map[*call]struct{}{}}
	p.all = append(p.all, h)
	slices.SortFunc(p.all, func(a, b *host) int { return strings.Compare(a.name, b.name) })
	return h
}

// remove forgets an address that the target has no longer; what is in flight
// there may finish.
func (p *hosts) remove(h *host) {
	h.disconnected(nil)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all = slices.DeleteFunc(p.all, func(x *host) bool { return x == h })
	p.tell()
}

// tell wakes everybody who waits for a host, and says how many batches are
// welcome. The caller holds mu.
func (p *hosts) tell() {
	close(p.changed)
	p.changed = make(chan struct{})
	lanes := 0
	for _, h := range p.all {
		if h.usable {
			lanes += int(h.window)
		}
	}
	if lanes = min(max(lanes, 1), p.inFlight); lanes != p.lanes {
		p.lanes = lanes
		p.onLanes(lanes)
	}
}

// wait is closed when something about the hosts changes.
func (p *hosts) wait() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.changed
}

func (p *hosts) unresolved(why string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if why != p.why {
		p.why = why
		p.log.Warn("the target cannot be resolved, trying again", "error", why)
	}
}

func (p *hosts) resolved() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.why = ""
}

// complaint says why no host can be used.
func (p *hosts) complaint() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.all) == 0 {
		if p.why != "" {
			return errors.New(p.why)
		}
		return errors.New("no host of the target is known yet")
	}
	var all []error
	for _, h := range p.all {
		if h.said != "" {
			all = append(all, fmt.Errorf("%s: %s", h.name, h.said))
		}
	}
	if len(all) == 0 {
		return errors.New("no host is connected yet")
	}
	return errors.Join(all...)
}

// connected tells that gRPC has a connection: whether the host is well has to
// be found out.
func (h *host) connected(sub balancer.SubConn) {
	p := h.hosts
	p.mu.Lock()
	defer p.mu.Unlock()
	if h.cancel != nil {
		h.cancel()
	}
	ctx, cancel := context.WithCancel(context.Background())
	h.sub, h.cancel = sub, cancel
	h.maxBytes = 0 // it may have been started again, with other limits
	go p.check(ctx, h)
}

// disconnected tells that the connection is gone; gRPC makes another one. Calls
// that were on it end by themselves.
func (h *host) disconnected(err error) {
	p := h.hosts
	p.mu.Lock()
	defer p.mu.Unlock()
	if h.cancel != nil {
		h.cancel()
		h.cancel = nil
	}
	h.sub = nil
	switch {
	case err != nil:
		h.leave(connectionProblem(err))
	case h.usable:
		h.leave("the connection ended")
	}
}

func (h *host) connection() balancer.SubConn {
	h.hosts.mu.Lock()
	defer h.hosts.mu.Unlock()
	return h.sub
}

// leave stops using the host and says why, once. The caller holds mu.
func (h *host) leave(why string) {
	h.usable = false
	if tellsMore(why, h.said) {
		h.said = why
		h.hosts.log.Warn("host left", "host", h.name, "reason", why)
	}
	h.hosts.tell()
}

// tellsMore tells whether a reason why a host is left says something else than the
// last one. What is in brackets may differ each time, like the port that was tried
// from; and that writing failed is seen where the host hung up before it was
// read why.
func tellsMore(why, said string) bool {
	now, detail, _ := strings.Cut(why, " (")
	before, _, _ := strings.Cut(said, " (")
	return now != before && (said == "" || !strings.Contains(detail, brokenPipe))
}

// well takes the host among those that get batches.
func (h *host) well() {
	p := h.hosts
	p.mu.Lock()
	defer p.mu.Unlock()
	if h.usable || h.sub == nil {
		return
	}
	h.usable, h.window = true, firstWindow
	if h.said != "" {
		p.log.Info("host is back", "host", h.name)
		h.said = ""
	}
	p.tell()
}

// unwell stops using the host. If it does not answer at all, its calls are
// given up, so that their batches can go elsewhere.
func (h *host) unwell(why string, silent bool) {
	p := h.hosts
	p.mu.Lock()
	defer p.mu.Unlock()
	h.leave(why)
	if silent {
		for c := range h.calls {
			c.cancel(errHostSilent)
		}
	}
}

var errHostSilent = errors.New("the host does not answer")

// answered learns from what a host reports with an answer. Its window is what
// keeps its workers busy with little waiting in its queue:
//
//	waited less than half as long as it was computed   one more, in as many answers as there are in flight
//	waited longer than one and a half times            one tenth less
//
// Where the way there takes longer than the computing, that counts instead: a
// wait that the way hides is none.
//
// A model that computes for microseconds waits longer than that for its worker
// to wake up, with nothing in its queue. Then the batches tell, by how full
// they were on leaving here (fill, 1 is full):
//
//	waited for less than it takes to wake up, full      one more, as above
//	the same, less than half full                       one less, as slowly
func (h *host) answered(load oip.Load, reported bool, took time.Duration, fill float64) {
	p := h.hosts
	p.mu.Lock()
	defer p.mu.Unlock()
	before := int(h.window)
	if !reported { // it does not say: what it answers in time it may get more of
		h.window = min(h.window+1/h.window, maxPlainWindow)
	} else {
		switch {
		case load.Queue < load.Compute/2, load.Queue < wakeTime && fill >= 1:
			if float64(h.inFlight) >= h.window-1 { // else it would grow without being used
				h.window = min(h.window+1/h.window, float64(p.inFlight))
			}
		case load.Queue < wakeTime && fill < 0.5 && h.window > firstWindow:
			h.window = max(h.window-1/h.window, firstWindow)
		case load.Queue > max(load.Compute, took-load.Queue)*3/2:
			h.window = max(h.window*0.9, leastWindow)
		}
	}
	if int(h.window) != before {
		p.tell()
	}
}

// wakeTime is what broker and worker may take to wake up, on a busy host.
const wakeTime = 300 * time.Microsecond

// maxPlainWindow bounds what a server that reports nothing has in flight.
const maxPlainWindow = 4

// tooLarge has the host get smaller messages than one that it has refused.
func (h *host) tooLarge(size int, why string) {
	p := h.hosts
	p.mu.Lock()
	defer p.mu.Unlock()
	if most := max(1, size/2); h.maxBytes == 0 || most < h.maxBytes {
		h.maxBytes, h.learned = most, time.Now()
		p.log.Info("the host takes no messages of that size: batches go there in parts", "host", h.name, "bytes", size, "reason", why)
	}
}

// mostBytes bounds a message's tensors; 0: nothing does. What was learned is
// forgotten after a while: the limit may be another one by then, or it was one
// odd batch that was refused. The caller holds mu.
func (h *host) mostBytes(now time.Time) int {
	if h.maxBytes > 0 && now.Sub(h.learned) >= sizeMemory {
		h.maxBytes = 0
	}
	return h.maxBytes
}

const sizeMemory = 5 * time.Minute

// overloaded halves what a host may have in flight: it has refused a batch.
func (h *host) overloaded() {
	p := h.hosts
	p.mu.Lock()
	defer p.mu.Unlock()
	h.window = max(h.window/2, leastWindow)
	p.tell()
}

// call is one batch, or a part of it, that is on its way to a host.
type call struct {
	host   *host
	cancel context.CancelCauseFunc
}

// begin counts a call; end follows.
func (h *host) begin(cancel context.CancelCauseFunc) *call {
	c := &call{h, cancel}
	h.calls[c] = struct{}{}
	h.inFlight++
	return c
}

func (c *call) end() {
	p := c.host.hosts
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(c.host.calls, c)
	c.host.inFlight--
	close(p.changed) // there is room
	p.changed = make(chan struct{})
}

// state is for logs and tests.
func (p *hosts) state() (usable int, lanes int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, h := range p.all {
		if h.usable {
			usable++
		}
	}
	return usable, p.lanes
}

// every calls f again and again until ctx ends.
func every(ctx context.Context, d time.Duration, f func()) {
	t := time.NewTicker(d)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			f()
		}
	}
}

// pause waits for d, or for the end of ctx.
func pause(ctx context.Context, d time.Duration) { pauseUntil(ctx, d, nil) }

// pauseUntil is pause that a change of the hosts ends, too.
func pauseUntil(ctx context.Context, d time.Duration, changed <-chan struct{}) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-changed:
	case <-t.C:
	}
}
