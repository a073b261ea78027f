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
}{
	{"one client whose inputs raise, window 64", 64, "raise", 80, false},
	{"one client whose inputs raise, window 8", 8, "raise", 80, false},
	{"one client that changes its inputs under the worker, window 8", 8, "toggle", 80, false},
	{"one client with 8 inputs in flight that kill workers", 8, "kill", 50, true},
}

// Times of a round, and of a batch.
const (
	besideGood = time.Second
	besideBad  = 4 * time.Second
	besideRest = time.Second // until the hostile client has no debt
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
		p := r.start(testbed.Spec{Role: "hostile client", Job: hostileClientJob{h.socket(), x.window}, Procs: 2})
		r.must(p.Expect("ready", nil, enoughTime))
		var good, bad latencies
		for range r.events {
			h.beside(p, "good", besideGood, &good)
			h.beside(p, x.send, besideBad, &bad)
			h.beside(p, "", besideRest, &latencies{})
		}
		r.bed.End(p)
		h.judgeBeside(x.name, x.least, x.kills, bad, good)
		h.endLoads("WorkerDied")
		suspended := h.log.count("worker suspended: it failed batches that other workers ran")
		r.check(suspended == 0, "%s: a good worker was suspended", x.name)
		stop()
		h.end()
	}
}

// beside has a hostile client send inputs for a time, and adds what honest clients have meanwhile.
func (h *host) beside(p *testbed.Process, send string, d time.Duration, sum *latencies) {
	h.r.must(p.Send(send))
	h.r.must(p.Expect("sending", nil, enoughTime))
	h.latencies()
	time.Sleep(d)
	l := h.latencies()
	sum.N, sum.P99 = sum.N+l.N, max(sum.P99, l.P99) // the worst of the rounds
}

// judgeBeside compares what honest clients had beside bad and beside good inputs.
func (h *host) judgeBeside(name string, least int, kills bool, bad, good latencies) {
	r, percent := h.r, int(100*float64(bad.N)/float64(max(1, good.N))*besideGood.Seconds()/besideBad.Seconds())
	text := fmt.Sprintf("%s: honest clients have %d %%, p99 %v; beside good inputs p99 %v, n %d", name, percent,
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
	Socket string
	Window int
}

// playHostileClient keeps its window full of inputs of the kind that the last command named.
func playHostileClient(child *testbed.Child, job hostileClientJob) error {
	ctx := child.Context()
	c, err := client.Dial(ctx, theModel.Name, client.WithSocket(job.Socket), client.WithWindow(job.Window), client.WaitForModel())
	if err != nil {
		return err
	}
	stop := func() {}
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
			stop()
			if stop = func() {}; kind != "" {
				stop = keepSending(ctx, c, kind, job.Window)
			}
			if err := child.Tell("sending", nil); err != nil {
				return err
			}
		}
	}
}

// keepSending keeps a window full of inputs of a kind until stop is called.
func keepSending(ctx context.Context, c *client.Client, kind string, window int) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var senders sync.WaitGroup
	for k := range window {
		senders.Go(func() {
			for id := int64(1); ctx.Err() == nil; id++ {
				_ = sendKind(ctx, c, kind, id<<8|int64(k)) // the error is its purpose
			}
		})
	}
	return func() { cancel(); senders.Wait() }
}

// sendKind sends one input of a kind.
func sendKind(ctx context.Context, c *client.Client, kind string, id int64) error {
	first := map[string]int64{"good": cmdAnswer, "raise": cmdRaise, "kill": cmdPoison, "toggle": cmdRaise}[kind]
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
	x[0], x[1] = first, id
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
