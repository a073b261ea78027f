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

// hosts are the addresses of the target with their state.
type hosts struct {
	log      *slog.Logger
	inFlight int                          // most batches at once, of all hosts
	check    func(context.Context, *host) // runs while a host is connected
	onLanes  func(int)                    // called when the number of lanes changes

	mu      sync.Mutex // guards what follows, and the fields of every host
	all     []*host    // by name
	turn    int        // for ties
	changed chan struct{}
	why     string // why the target could not be resolved
	lanes   int    // batches to take at once
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
	said   string // the logged reason why it is not usable

	inFlight int
	window   float64 // batches that it may have in flight
	calls    map[*call]struct{}

	plain    bool      // no ringbatch gateway: a batch fails as a whole
	maxBatch int       // rows
	maxBytes int       // of a message's tensors; 0: no limit is known
	learned  time.Time // when maxBytes was learned
}

func newHosts(log *slog.Logger, inFlight int) *hosts {
	return &hosts{
		log: log, inFlight: inFlight, changed: make(chan struct{}), check: func(context.Context, *host) {}, onLanes: func(int) {},
		turn: rand.IntN(1 << 16), // so that relays do not go round in step
	}
}

const (
	firstWindow = 2 // of a host that has not reported its load
	leastWindow = 1
)

func (p *hosts) add(name string) *host {
	p.mu.Lock()
	defer p.mu.Unlock()
	h := &host{hosts: p, name: name, window: firstWindow, calls: map[*call]struct{}{}}
	p.all = append(p.all, h)
	slices.SortFunc(p.all, func(a, b *host) int { return strings.Compare(a.name, b.name) })
	return h
}

// remove forgets an address that the target has lost. Calls in flight may finish.
func (p *hosts) remove(h *host) {
	h.disconnected(nil)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all = slices.DeleteFunc(p.all, func(x *host) bool { return x == h })
	p.notify()
}

// notify wakes the batches that wait for a host, and updates the lanes. The caller
// holds mu.
func (p *hosts) notify() {
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

// wait returns a channel that is closed at the next change of a host.
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

// complaint returns why no host is usable.
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

// connected notes a connection. The host is usable after its first check.
func (h *host) connected(sub balancer.SubConn) {
	p := h.hosts
	p.mu.Lock()
	defer p.mu.Unlock()
	if h.cancel != nil {
		h.cancel()
	}
	ctx, cancel := context.WithCancel(context.Background())
	h.sub, h.cancel = sub, cancel
	h.maxBytes = 0 // a restarted host may have other limits
	go p.check(ctx, h)
}

// disconnected notes the end of a connection. gRPC ends its calls, and connects
// again.
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

// leave stops using the host, and logs each reason once. The caller holds mu.
func (h *host) leave(why string) {
	h.usable = false
	if isNewReason(why, h.said) {
		h.said = why
		h.hosts.log.Warn("host left", "host", h.name, "reason", why)
	}
	h.hosts.notify()
}

// isNewReason reports whether a reason differs from the logged one. Details in
// brackets, such as our port, differ each time. A failed write hides the reason of
// a host that hung up.
func isNewReason(why, said string) bool {
	now, detail, _ := strings.Cut(why, " (")
	before, _, _ := strings.Cut(said, " (")
	return now != before && (said == "" || !strings.Contains(detail, brokenPipe))
}

// markUsable lets the host get batches.
func (h *host) markUsable() {
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
	p.notify()
}

// markUnusable stops using the host. The calls of a silent host are given up, so
// that their batches can go elsewhere.
func (h *host) markUnusable(why string, silent bool) {
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

// learnLoad adapts the host's window to the load that it reports with an answer.
// The window keeps its workers busy with a short queue:
//
//	queued < computed/2        one more, in as many answers as are in flight
//	queued > 1.5 × computed    one tenth less
//
// If the network takes longer than the computing, the network's time counts
// instead: it hides the wait.
//
// A model that computes for microseconds queues longer than that while its worker
// wakes up. Below wakeTime the rows of the batches decide (fill, 1 is full):
//
//	full                       one more, as above
//	less than half full        one less, as slowly
func (h *host) learnLoad(load oip.Load, reported bool, took time.Duration, fill float64) {
	p := h.hosts
	p.mu.Lock()
	defer p.mu.Unlock()
	before := int(h.window)
	if !reported { // each answer lets it have more
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
		p.notify()
	}
}

// wakeTime is how long broker and worker take to wake up on a busy host.
const wakeTime = 300 * time.Microsecond

// maxPlainWindow bounds the window of a server that does not report its load.
const maxPlainWindow = 4

// tooLarge limits the host's messages to half the size that it has refused.
func (h *host) tooLarge(size int, why string) {
	p := h.hosts
	p.mu.Lock()
	defer p.mu.Unlock()
	if most := max(1, size/2); h.maxBytes == 0 || most < h.maxBytes {
		h.maxBytes, h.learned = most, time.Now()
		p.log.Info("the host takes no messages of that size: batches go there in parts", "host", h.name, "bytes", size, "reason", why)
	}
}

// mostBytes returns the limit of a message's tensors; 0: none is known. A learned
// limit ends after sizeMemory, as the host may have changed it. The caller holds mu.
func (h *host) mostBytes(now time.Time) int {
	if h.maxBytes > 0 && now.Sub(h.learned) >= sizeMemory {
		h.maxBytes = 0
	}
	return h.maxBytes
}

const sizeMemory = 5 * time.Minute

// overloaded halves the window of a host that has refused a batch.
func (h *host) overloaded() {
	p := h.hosts
	p.mu.Lock()
	defer p.mu.Unlock()
	h.window = max(h.window/2, leastWindow)
	p.notify()
}

// call is a batch, or a part of it, in flight to a host.
type call struct {
	host   *host
	cancel context.CancelCauseFunc
}

// beginCall counts a call. Call endCall when it has ended. The caller holds mu.
func (h *host) beginCall(cancel context.CancelCauseFunc) *call {
	c := &call{h, cancel}
	h.calls[c] = struct{}{}
	h.inFlight++
	return c
}

func (c *call) endCall() {
	p := c.host.hosts
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(c.host.calls, c)
	c.host.inFlight--
	close(p.changed) // there is room
	p.changed = make(chan struct{})
}

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

// every calls f once per interval until ctx ends.
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

// pauseUntil also ends at a change of the hosts.
func pauseUntil(ctx context.Context, d time.Duration, changed <-chan struct{}) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-changed:
	case <-t.C:
	}
}
