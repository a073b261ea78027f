// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/histogram"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// hostiles are clients whose requests fail. Beside one of them, honest clients keep at least a
// share of what they have while the same client sends good inputs.
var hostiles = []struct {
	name   string
	window int
	send   string // one of sendings of playHostileClient
	least  int    // percent
	kills  bool   // workers must be started again
	token  bool   // of a gateway, with an honest caller beside it
}{
	{"one client whose inputs raise, window 64", 64, "raise", 80, false, false},
	{"one client whose inputs raise, window 8", 8, "raise", 80, false, false},
	{"one client that changes its inputs under the worker, window 8", 8, "toggle", 80, false, false},
	{"one client with 8 inputs in flight that kill workers", 8, "kill", 50, true, false},
	{"one token of a gateway whose inputs raise, 64 at once", 64, "raise", 80, false, true},
}

// Times of a round, and of a batch.
const (
	besideGood = time.Second
	besideBad  = 4 * time.Second
	besideRest = time.Second     // until the hostile client has no debt
	besideSkip = 3 * time.Second // until the gateway knows the token
	batchTakes = time.Millisecond
)

// honestBesideHostile measures 8 honest clients beside one of the hostile clients, which sends good
// and bad inputs in turns.
func honestBesideHostile(r *run) {
	for i, x := range hostiles {
		job := r.brokerJob()
		job.Socket = r.bed.Path(fmt.Sprintf("beside%d.sock", i))
		h := r.startHost(job, 0, testbed.Spec{})
		h.takes = batchTakes
		stop := h.keepWorkers(2)
		h.load(loadJob{Load: 8, Clients: 8})
		hostile, skip := hostileClientJob{Socket: h.socket(), Window: x.window}, time.Duration(0)
		var caller, g *testbed.Process // of a gateway
		if x.token {
			g, hostile.Gateway = h.startGateway()
			caller = h.startSender(hostileClientJob{Window: 8, Gateway: hostile.Gateway, Token: goodToken})
			hostile.Token, skip = badToken, besideSkip
		}
		p := h.startSender(hostile)
		var good, bad neighbours
		for left := r.events - 1; left >= 0; left-- {
			h.beside(p, "good", caller, 0, besideGood, &good)
			h.beside(p, x.send, caller, skip, besideBad, &bad)
			h.beside(p, "", caller, 0, min(besideRest, time.Duration(left)*besideRest), &neighbours{})
		}
		r.bed.End(p)
		h.judgeBeside(x.name+": honest clients", x.least, x.kills, bad.ring, good.ring)
		if x.token {
			h.judgeBeside(x.name+": another token", x.least, false, bad.caller, good.caller)
			r.bed.End(caller, g)
		}
		h.endLoads("WorkerDied")
		suspended := h.log.count("worker suspended: it failed batches that other workers ran")
		r.check(suspended == 0, "%s: a good worker was suspended", x.name)
		stop()
		h.end()
	}
}

// neighbours are what honest clients of the ring, and an honest caller of a gateway, had.
type neighbours struct{ ring, caller latencies }

// beside has a hostile client send inputs for a time, and adds what the others have after skip.
func (h *host) beside(p *testbed.Process, send string, caller *testbed.Process, skip, d time.Duration, sum *neighbours) {
	h.sendNow(p, send)
	time.Sleep(skip)
	h.latencies()
	if caller != nil {
		h.sendNow(caller, "good")
	}
	time.Sleep(d)
	sum.ring.add(h.latencies())
	if caller != nil {
		sum.caller.add(h.sendNow(caller, "good"))
	}
}

// add keeps the worst of the rounds.
func (l *latencies) add(m latencies) { l.N, l.P99 = l.N+m.N, max(l.P99, m.P99) }

func (h *host) startSender(job hostileClientJob) *testbed.Process {
	p := h.r.start(testbed.Spec{Role: "hostile client", Job: job, Procs: 2})
	h.r.must(p.Expect("ready", nil, enoughTime))
	return p
}

// sendNow has a sender send inputs of a kind, and returns what it had since the last time.
func (h *host) sendNow(p *testbed.Process, kind string) (l latencies) {
	h.r.must(p.Send(kind))
	h.r.must(p.Expect("sending", &l, enoughTime))
	return l
}

// judgeBeside compares what honest clients had beside bad and beside good inputs.
func (h *host) judgeBeside(name string, least int, kills bool, bad, good latencies) {
	r, percent := h.r, int(100*float64(bad.N)/float64(max(1, good.N))*besideGood.Seconds()/besideBad.Seconds())
	text := fmt.Sprintf("%s: %d %%, p99 %v; beside good inputs p99 %v, n %d", name, percent,
		bad.P99.Round(time.Microsecond), good.P99.Round(time.Microsecond), good.N)
	fmt.Println("   " + text)
	if min(good.N, bad.N) < enough {
		r.notJudged("%s; too few requests", text)
		return
	}
	r.check(percent >= least, "%s, at least %d %% promised", text, least)
	if kills {
		most := 2 * r.median(workerStart)
		r.quick(bad.P99 <= good.P99+most, "%s; two starts of a worker take %v", text, most)
	}
}

type hostileClientJob struct {
	Socket         string
	Window         int
	Gateway, Token string // instead of Socket
}

// playHostileClient keeps its window full of inputs of the kind that the last command named.
func playHostileClient(child *testbed.Child, job hostileClientJob) error {
	ctx := child.Context()
	send, err := job.dial(ctx)
	if err != nil {
		return err
	}
	stop := func() latencies { return latencies{} }
	defer func() { stop() }()
	_ = child.Ready()
	for {
		select {
		case <-ctx.Done():
			return nil
		case m := <-child.Commands():
			kind := ""
			if err := json.Unmarshal(m, &kind); err != nil {
				return err
			}
			had := stop()
			if stop = func() latencies { return latencies{} }; kind != "" {
				stop = keepSending(ctx, send, kind, job.Window)
			}
			if err := child.Tell("sending", had); err != nil {
				return err
			}
		}
	}
}

// sending sends one input of a kind.
type sending func(ctx context.Context, kind string, id int64) error

func (job hostileClientJob) dial(ctx context.Context) (sending, error) {
	if job.Gateway != "" {
		return dialGateway(job.Gateway, job.Token)
	}
	c, err := client.Dial(ctx, theModel.Name, client.WithSocket(job.Socket), client.WithWindow(job.Window), client.WaitForModel())
	return func(ctx context.Context, kind string, id int64) error { return sendKind(ctx, c, kind, id) }, err
}

// keepSending keeps a window full of inputs of a kind until stop is called, which returns what was answered.
func keepSending(ctx context.Context, send sending, kind string, window int) (stop func() latencies) {
	ctx, cancel := context.WithCancel(ctx)
	var senders sync.WaitGroup
	var mu sync.Mutex
	var answered histogram.Histogram
	for k := range window {
		senders.Go(func() {
			for id := int64(1); ctx.Err() == nil; id++ {
				start := time.Now()
				if send(ctx, kind, id<<8|int64(k)) == nil { // a hostile one's error is its purpose
					mu.Lock()
					answered.Add(time.Since(start))
					mu.Unlock()
				}
			}
		})
	}
	return func() latencies {
		cancel()
		senders.Wait()
		return latencies{N: answered.Count(), P99: answered.Quantile(0.99)}
	}
}

// firstOf is the first number of an input of a kind.
var firstOf = map[string]int64{"good": cmdAnswer, "raise": cmdRaise, "kill": cmdPoison, "toggle": cmdRaise}

// sendKind sends one input of a kind.
func sendKind(ctx context.Context, c *client.Client, kind string, id int64) error {
	req, err := c.Claim(ctx, 1)
	if err != nil {
		return err
	}
	defer req.Release()
	view, err := req.Input("x")
	if err != nil {
		return err
	}
	x, err := tensor.As[int64](view)
	if err != nil {
		return err
	}
	x[0], x[1] = firstOf[kind], id
	if err := req.Commit(ctx); err != nil {
		return err
	}
	if kind != "toggle" {
		return req.Wait(ctx)
	}
	ended := make(chan error, 1)
	go func() { ended <- req.Wait(ctx) }()
	for {
		select {
		case err := <-ended:
			return err
		case <-time.After(time.Duration(100+rand.IntN(1000)) * time.Microsecond):
			x[0] = cmdRaise - x[0] // cmdAnswer is 0
		}
	}
}
