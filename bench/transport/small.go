// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/bench/rig"
	"github.com/ringbatch/ringbatch/internal/printable"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/tools/load"
)

const (
	smallProducers = 8
	smallInFlight  = 16
	// Half of the requests in flight make a batch: while one half is answered, the other half is on its way.
	smallBatch = smallProducers * smallInFlight / 2
	smallSlots = 4 * smallProducers * smallInFlight
)

// measureSmall has 8 producer processes with 16 requests of 64 bytes in flight each, against the same exchange over a Unix
// socket. The kind "rows" sends the 16 of a producer as one request.
func measureSmall(r *rig.Rig) {
	e := startEcho(r, 1, small64("small", smallBatch, smallSlots))
	producers := startProducers(r, smallProducers, producerJob{Socket: e.socket, Model: "small", Window: smallInFlight})
	serving := [][]*testbed.Process{{e.broker}, e.workers}
	kinds := []string{"ring", "rows", "stream", "seqpacket"}
	sockets := map[string][]*testbed.Process{}
	for _, kind := range kinds[2:] {
		sockets[kind] = startSockets(r, kind, smallProducers)
	}
	rates := map[string][]float64{}
	cpus := map[string][3][]float64{} // broker, worker, producers; of sockets: server, clients
	r.InTurns("small", func(counts bool) {
		for _, kind := range kinds {
			var rate float64
			var used []float64
			switch kind {
			case "ring":
				rate, used = streamRate(r, serving, producers, 1, r.Round)
			case "rows":
				rate, used = streamRate(r, serving, producers, smallInFlight, r.Round)
			default:
				rate, used = socketRate(r, sockets[kind], r.Round)
			}
			if counts {
				rates[kind] = append(rates[kind], rate)
				all := cpus[kind]
				for i, us := range used {
					all[i] = append(all[i], us)
				}
				cpus[kind] = all
			}
		}
	})
	best := "stream"
	if rig.Median(rates["seqpacket"]) > rig.Median(rates[best]) {
		best = "seqpacket"
	}
	var ratios []float64
	for i, rate := range rates["ring"] {
		ratios = append(ratios, rate/rates[best][i])
	}
	batch := 0.0
	if m, err := load.ModelStats(r.Context(), e.socket, "small"); err == nil {
		batch = m.BatchSize.Avg
	}
	per := func(kind string, i int) float64 { return rig.Median(cpus[kind][i]) }
	rate := func(kind string) string { return printable.Number(rig.Median(rates[kind])) }
	r.Check("small_ratio", rig.Median(ratios), ">=", 10,
		"%s requests/s in batches of %.0f / %s over a Unix socket (%s); stream %s, seqpacket %s; CPU a request %.2f µs (broker %.2f, "+
			"worker %.2f, producers %.2f) / %.2f µs; %s rows/s where the %d are rows of one request; median of %d rounds",
		rate("ring"), batch, rate(best), best, rate("stream"), rate("seqpacket"), per("ring", 0)+per("ring", 1)+per("ring", 2),
		per("ring", 0), per("ring", 1), per("ring", 2), per(best, 0)+per(best, 1), rate("rows"), smallInFlight, len(ratios))
}

// streamRate is rows per second in requests of that many rows, and CPU microseconds per row of each group that serves and,
// last, of the producers.
func streamRate(r *rig.Rig, serving [][]*testbed.Process, producers []*testbed.Process, rows int, d time.Duration) (float64, []float64) {
	return rateOf(r, serving, d, func() []outcome { return together(r, producers, order{Do: "stream", Rows: rows}, d) })
}

// socketRate is the same for a socket server, the first process, and its clients.
func socketRate(r *rig.Rig, procs []*testbed.Process, d time.Duration) (float64, []float64) {
	return rateOf(r, [][]*testbed.Process{procs[:1]}, d, func() []outcome {
		o := socketOrder{InFlight: smallInFlight, Start: shm.Now() + int64(load.LeadTime)}
		o.Until = o.Start + int64(d)
		return rig.OrderAll[outcome](r, procs[1:], o)
	})
}

func rateOf(r *rig.Rig, serving [][]*testbed.Process, d time.Duration, run func() []outcome) (rate float64, used []float64) {
	before := r.CPUTimes(serving)
	sum := total(run())
	each := func(nanos float64) float64 { return nanos / 1e3 / float64(max(sum.Requests, 1)) }
	for i, after := range r.CPUTimes(serving) {
		used = append(used, each(float64(after-before[i])))
	}
	return float64(sum.Requests) / d.Seconds(), append(used, each(float64(sum.CPU)))
}

// startSockets starts a server (the first process) and n clients.
func startSockets(r *rig.Rig, kind string, n int) []*testbed.Process {
	typ := unix.SOCK_STREAM
	if kind == "seqpacket" {
		typ = unix.SOCK_SEQPACKET
	}
	var servers, clients []*os.File
	defer func() {
		for _, s := range append(servers, clients...) {
			s.Close()
		}
	}()
	for range n {
		pair, err := unix.Socketpair(unix.AF_UNIX, typ|unix.SOCK_CLOEXEC, 0)
		r.Must(err)
		servers = append(servers, os.NewFile(uintptr(pair[0]), "server end"))
		clients = append(clients, os.NewFile(uintptr(pair[1]), "client end"))
	}
	raw := []string{"GODEBUG=asyncpreemptoff=1"} // Go's scheduler must not interrupt threads that block in raw system calls
	server := testbed.Spec{Role: "socket server", Job: socketJob{n}, Files: servers, Env: raw, Procs: n + 2}
	rest := []*testbed.Process{r.MustStart(server)}
	return append(rest, r.MustStartAll(n, func(i int) testbed.Spec {
		return testbed.Spec{Role: "socket client", Procs: 2, Files: clients[i : i+1], Env: raw}
	})...)
}
