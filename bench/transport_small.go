// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/ringbatch/ringbatch/internal/testbed"
	"github.com/ringbatch/ringbatch/shm"
)

// smallFigures: 8 producer processes with 16 requests of 64 bytes in flight
// each, against the same exchange over a Unix socket.
type smallFigures struct {
	RequestsPerS float64            `json:"requests_per_s"`
	SocketPerS   float64            `json:"socket_requests_per_s"` // the fastest kind
	SocketKind   string             `json:"socket_kind"`
	Sockets      map[string]float64 `json:"sockets"`                   // all kinds
	RowsPerS     float64            `json:"rows_per_s_as_one_request"` // what a producer has in flight, as one request of as many rows
	BatchAvg     float64            `json:"batch_avg"`
	CPUUS        float64            `json:"cpu_us_per_request"`
	BrokerUS     float64            `json:"broker_cpu_us_per_request"`
	WorkerUS     float64            `json:"worker_cpu_us_per_request"`
	ProducersUS  float64            `json:"producers_cpu_us_per_request"`
	NetRatio     float64            `json:"ratio_to_net"` // the same with package net on the other side
	SocketCPUUS  float64            `json:"socket_cpu_us_per_request"`
	Rounds       []float64          `json:"rounds"`
}

const (
	smallProducers = 8
	smallInFlight  = 16
	// Half of what is in flight makes a batch: while one half is answered,
	// the other half is on its way.
	smallBatch   = smallProducers * smallInFlight / 2
	smallWorkers = 1
)

func measureSmall(f *fleet, o transportOptions, say *progress.Line, r *transportReport) error {
	e, err := f.startEcho(smallWorkers, echoJob{Model: "small", Inputs: []string{"x:u8[64]"}, Outputs: []string{"y:u8[64]"}, MaxBatch: smallBatch, Slots: 4 * smallProducers * smallInFlight})
	if err != nil {
		return err
	}
	producers, err := f.startTransport(smallProducers, transportJob{Socket: e.socket, Model: "small", Window: smallInFlight, Sessions: 1})
	if err != nil {
		return err
	}
	serving := [][]*testbed.Process{{e.broker}, e.workers}
	kinds := []string{"stream", "seqpacket", "net"}
	sockets := map[string][]*testbed.Process{}
	for _, kind := range kinds {
		if sockets[kind], err = f.startSockets(kind, smallProducers); err != nil {
			return err
		}
	}
	var ours, rows []float64
	var cpus [3][]float64 // broker, worker, producers
	theirs, theirCPUs := map[string][]float64{}, map[string][]float64{}
	for round := range o.Rounds + 1 {
		say.Say("small: round %d of %d", round+1, o.Rounds+1)
		rate, used, err := streamRate(serving, producers, 1, o.Round)
		if err != nil {
			return err
		}
		asOne, _, err := streamRate(serving, producers, smallInFlight, o.Round)
		if err != nil {
			return err
		}
		if round > 0 {
			ours, rows = append(ours, rate), append(rows, asOne)
			for i := range cpus {
				cpus[i] = append(cpus[i], used[i])
			}
		}
		for _, kind := range kinds {
			rate, used, err := socketRate(sockets[kind], o.Round)
			if err != nil {
				return err
			}
			if round > 0 {
				theirs[kind], theirCPUs[kind] = append(theirs[kind], rate), append(theirCPUs[kind], used[0]+used[1])
			}
		}
	}
	fig := &smallFigures{Sockets: map[string]float64{}}
	for _, kind := range kinds {
		if m := medianOf(theirs[kind]); m > fig.SocketPerS {
			fig.SocketPerS, fig.SocketKind, fig.SocketCPUUS = m, kind, medianOf(theirCPUs[kind])
		}
		fig.Sockets[kind] = medianOf(theirs[kind])
	}
	for i, rate := range ours {
		fig.Rounds = append(fig.Rounds, rate/theirs[fig.SocketKind][i])
	}
	if m, err := modelStats(f.Context(), e.socket, "small"); err == nil {
		fig.BatchAvg = m.BatchSize.Avg
	}
	fig.RequestsPerS, fig.RowsPerS = medianOf(ours), medianOf(rows)
	fig.BrokerUS, fig.WorkerUS, fig.ProducersUS = medianOf(cpus[0]), medianOf(cpus[1]), medianOf(cpus[2])
	fig.CPUUS = fig.BrokerUS + fig.WorkerUS + fig.ProducersUS
	fig.NetRatio = fig.RequestsPerS / fig.Sockets["net"]
	r.Small, r.SmallRatio = fig, medianOf(fig.Rounds)
	r.check("small_ratio", r.SmallRatio, ">= 10", r.SmallRatio >= 10,
		"%s requests/s in batches of %.0f / %s over a Unix socket (%s); stream %s, seqpacket %s, Go net %s (ratio %.1f); CPU a request %.2f µs (broker %.2f, worker %.2f, producers %.2f) / %.2f µs; %s rows/s where the %d are rows of one request; median of %d rounds",
		big(fig.RequestsPerS), fig.BatchAvg, big(fig.SocketPerS), fig.SocketKind, big(fig.Sockets["stream"]), big(fig.Sockets["seqpacket"]), big(fig.Sockets["net"]), fig.NetRatio,
		fig.CPUUS, fig.BrokerUS, fig.WorkerUS, fig.ProducersUS, fig.SocketCPUUS, big(fig.RowsPerS), smallInFlight, len(ours))
	return nil
}

// streamRate is rows per second in requests of so many, and CPU microseconds
// per row of each group that serves and, last, of the producers.
func streamRate(serving [][]*testbed.Process, producers []*testbed.Process, rows int, d time.Duration) (rate float64, used []float64, err error) {
	return rateOf(serving, d, func() ([]transportResult, error) {
		return together(producers, transportOrder{Do: "stream", Rows: rows}, d)
	})
}

// socketRate is the same for a socket server, the first process, and its
// clients.
func socketRate(procs []*testbed.Process, d time.Duration) (rate float64, used []float64, err error) {
	return rateOf([][]*testbed.Process{procs[:1]}, d, func() ([]transportResult, error) {
		o := socketOrder{InFlight: smallInFlight, Start: shm.Now() + int64(leadTime)}
		o.Until = o.Start + int64(d)
		return orderAll[transportResult](procs[1:], o)
	})
}

func rateOf(serving [][]*testbed.Process, d time.Duration, run func() ([]transportResult, error)) (rate float64, used []float64, err error) {
	before, err := groupTimes(serving)
	if err != nil {
		return 0, nil, err
	}
	rs, err := run()
	if err != nil {
		return 0, nil, err
	}
	after, err := groupTimes(serving)
	sum := total(rs)
	each := func(nanos float64) float64 { return nanos / 1e3 / float64(max(sum.Requests, 1)) }
	for i := range after {
		used = append(used, each(float64(after[i]-before[i])))
	}
	return float64(sum.Requests) / d.Seconds(), append(used, each(float64(sum.CPU))), err
}

// startSockets starts a server (the first process) and n clients.
func (f *fleet) startSockets(kind string, n int) ([]*testbed.Process, error) {
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
		if err != nil {
			return nil, fmt.Errorf("socketpair: %w", err)
		}
		servers = append(servers, os.NewFile(uintptr(pair[0]), "server end"))
		clients = append(clients, os.NewFile(uintptr(pair[1]), "client end"))
	}
	server := testbed.Spec{Role: "socket server", Job: socketJob{kind, n}, Files: servers, Env: rawEnv}
	if kind != "net" {
		server.Procs = n + 2
	}
	p, err := f.StartReady(server)
	if err != nil {
		return nil, err
	}
	rest, err := f.StartAll(n, func(i int) testbed.Spec {
		return testbed.Spec{Role: "socket client", Job: socketJob{kind, 1}, Procs: 2, Files: clients[i : i+1], Env: rawEnv}
	})
	return append([]*testbed.Process{p}, rest...), err
}

// rawEnv keeps Go's scheduler from interrupting threads that block in raw
// system calls.
var rawEnv = []string{"GODEBUG=asyncpreemptoff=1"}
