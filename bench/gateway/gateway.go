// SPDX-License-Identifier: Apache-2.0

// Package gateway measures the cost of the gateway: ratios against a bare server of the same library that reads the same
// messages and answers with as many bytes.
package gateway

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"time"

	"google.golang.org/grpc"

	"github.com/ringbatch/ringbatch/bench/rig"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// Aims: docs/gateway.md.
const (
	aimSmall = 0.70 // of the bare server's requests/s, 64 bytes
	aimLarge = 0.75 // of its bytes/s, 602,112 bytes
	inRing   = 1.3  // requests of the ring that one caller may wait longer than at the bare server
	aimP99   = 2.0  // × the bare server's, open loop at 80 %

	callers   = 32
	startTime = 20 * time.Second
)

var errAnswer = errors.New("not the answer")

// Roles of this suite's processes.
func Roles() testbed.Roles { return testbed.Roles{"bare": BareRole} }

// Run is `bench gateway`.
func Run(ctx context.Context, args []string, out io.Writer) error {
	s := rig.Suite{Name: "gateway", About: "What the gateway adds to the network; see docs/gateway.md.", Rounds: 5, Round: time.Second}
	for _, protocol := range []string{"http", "grpc"} {
		for _, size := range Sizes {
			s.Parts = append(s.Parts, rig.Part{Name: protocol + "_" + size.Model, Run: func(r *rig.Rig) { measure(r, protocol, size) }})
		}
	}
	return s.Run(ctx, args, out)
}

// bed is the processes of a part, and the addresses of both servers for its protocol.
type bed struct {
	socket     string
	bare, gate string
	processes  [][]*testbed.Process // bare; gateway, broker, worker
}

func start(r *rig.Rig, protocol string, s Size) (b bed) {
	broker, socket := r.StartBroker("b.sock")
	b.socket = socket
	in, out := fmt.Sprintf("u8[%d]", s.Bytes), fmt.Sprintf("u8[%d]", s.Answer)
	worker := r.StartEcho(rig.EchoJob{Socket: socket, Model: s.Model, In: in, Out: out, MaxBatch: 32})
	server, at := StartBare(r)
	gate := r.StartProgram(socket, "gateway", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0")
	b.bare = at.GRPC
	if protocol == "http" {
		b.bare = at.HTTP
	}
	b.gate = r.Find(gate, protocol+" ")
	b.processes = [][]*testbed.Process{{server}, {gate, broker, worker}}
	return b
}

// measure has many callers, then one, then an open loop at 80 % of the gateway's rate.
func measure(r *rig.Rig, protocol string, s Size) {
	b := start(r, protocol, s)
	name := protocol + "_" + s.Model
	var sets [2][]rig.Caller
	for i, address := range []string{b.bare, b.gate} {
		all, end, err := connect(4*callers, protocol, address, s)
		defer end()
		r.Must(err)
		sets[i] = all
	}
	var cpu [2]time.Duration
	var calls [2]float64
	turn := func(i int) func(time.Duration) (rig.Turn, error) {
		return func(d time.Duration) (rig.Turn, error) {
			before := r.CPUTimes(b.processes)[i]
			t, err := rig.Call(r.Context(), sets[i][:callers], d)
			cpu[i] += r.CPUTimes(b.processes)[i] - before
			calls[i] += t.PerSecond * d.Seconds()
			return t, err
		}
	}
	closed := r.CompareTurns(name+", many callers", turn(0), turn(1))
	aim, unit, scale := aimSmall, "requests/s", 1.0
	if s.Bytes > 1000 {
		aim, unit, scale = aimLarge, "MB/s", float64(s.Bytes)/1e6
	}
	r.Check(name, closed[1].PerSecond/closed[0].PerSecond, ">=", aim,
		"%s, %d callers: gateway %.0f, bare %.0f %s; CPU of the servers %.1f and %.1f µs a request",
		s.Name, callers, closed[1].PerSecond*scale, closed[0].PerSecond*scale, unit, float64(cpu[1].Microseconds())/calls[1],
		float64(cpu[0].Microseconds())/calls[0])
	oneCaller(r, b.socket, name, s, sets[0][0], sets[1][0])
	rate := 0.8 * closed[1].PerSecond
	paced := func(set []rig.Caller) func(time.Duration) (rig.Turn, error) {
		return func(d time.Duration) (rig.Turn, error) { return rig.CallAt(r.Context(), set, arrivals(rate, d)) }
	}
	open := r.CompareTurns(name+", open loop", paced(sets[0]), paced(sets[1]))
	r.Check(name+"_p99", open[1].P99US/open[0].P99US, "<=", aimP99, "%s, open loop at %.0f requests/s: p99 gateway %.2f ms, bare %.2f ms",
		s.Name, rate, open[1].P99US/1e3, open[0].P99US/1e3)
}

// arrivals are Poisson, the same for both servers.
func arrivals(rate float64, d time.Duration) (due []time.Duration) {
	random := rand.New(rand.NewPCG(1, 2))
	for at := 0.0; at < d.Seconds(); at += random.ExpFloat64() / rate {
		due = append(due, time.Duration(at*1e9))
	}
	return due
}

// oneCaller compares latencies: the gateway adds a request of the ring to the bare server, and little more. The ring is asked
// at the pace of the network, so that broker and worker have gone to sleep.
func oneCaller(r *rig.Rig, socket, name string, s Size, bare, gate rig.Caller) {
	c, err := client.Dial(r.Context(), s.Model, client.WithSocket(socket), client.WithWindow(1))
	r.Must(err)
	defer c.Close()
	input := rig.Pattern(s.Bytes)
	ring := func(d time.Duration) (t rig.Turn, err error) {
		var took []float64
		for end := time.Now().Add(d); time.Now().Before(end); {
			if err := bare(r.Context()); err != nil {
				return t, err
			}
			begin := time.Now()
			if err := rig.Ask(r.Context(), c, input); err != nil {
				return t, err
			}
			took = append(took, float64(time.Since(begin))/1e3)
		}
		return rig.Turn{MedianUS: rig.Median(took)}, nil
	}
	one := func(c rig.Caller) func(time.Duration) (rig.Turn, error) {
		return func(d time.Duration) (rig.Turn, error) { return rig.Call(r.Context(), []rig.Caller{c}, d/2) }
	}
	t := r.CompareTurns(name+", one caller", one(bare), one(gate), ring)
	b, g, own := t[0].MedianUS, t[1].MedianUS, t[2].MedianUS
	r.Check(name+"_one", g/(b+inRing*own), "<=", 1,
		"%s, 1 caller: gateway %.0f µs, bare %.0f µs, ringbatch %.0f µs after each answer of the bare server; gateway / (bare + %g ringbatch)",
		s.Name, g, b, own, inRing)
}

// connect makes callers of a server; gRPC callers share connections, as those of one process do.
func connect(n int, protocol, address string, s Size) (all []rig.Caller, end func(), err error) {
	const perConnection = 8
	var ends []func()
	end = func() {
		for _, e := range ends {
			e()
		}
	}
	var shared *grpc.ClientConn
	for i := range n {
		if protocol == "http" {
			conn, err := net.Dial("tcp", address)
			if err != nil {
				return nil, end, err
			}
			ends = append(ends, func() { conn.Close() })
			all = append(all, httpCaller(conn, s))
			continue
		}
		if i%perConnection == 0 {
			if shared, err = Dial(address); err != nil {
				return nil, end, err
			}
			conn := shared
			ends = append(ends, func() { conn.Close() })
		}
		all = append(all, RPCCaller(shared, s, 1))
	}
	return all, end, nil
}

// httpCaller writes the same bytes each time and reads the answer with net/http's own reader: a caller that costs as little as
// possible shows the cost of the server.
func httpCaller(conn net.Conn, s Size) rig.Caller {
	input := rig.Pattern(s.Bytes)
	head := fmt.Sprintf(`{"inputs":[{"name":"x","datatype":"UINT8","shape":[1,%d],"parameters":{"binary_data_size":%d}}],`+
		`"outputs":[{"name":"y","parameters":{"binary_data":true}}]}`, s.Bytes, s.Bytes)
	var request bytes.Buffer
	request.WriteString(strings.Join([]string{"POST /v2/models/" + s.Model + "/infer HTTP/1.1", "Host: localhost",
		"Content-Type: application/octet-stream", fmt.Sprintf("Inference-Header-Content-Length: %d", len(head)),
		fmt.Sprintf("Content-Length: %d", len(head)+s.Bytes), "", head}, "\r\n"))
	request.Write(input)
	in := bufio.NewReaderSize(conn, 64<<10)
	body := make([]byte, s.Answer+1024)
	return func(context.Context) error {
		if _, err := conn.Write(request.Bytes()); err != nil {
			return err
		}
		rep, err := http.ReadResponse(in, nil)
		if err != nil {
			return err
		}
		n := int(rep.ContentLength)
		if rep.StatusCode != http.StatusOK || n < s.Answer || n > len(body) {
			text, _ := io.ReadAll(rep.Body)
			return fmt.Errorf("%w: %s %s", errAnswer, rep.Status, text)
		}
		if _, err := io.ReadFull(rep.Body, body[:n]); err != nil {
			return err
		}
		if !bytes.Equal(body[n-s.Answer:n], input[:s.Answer]) {
			return errAnswer
		}
		return nil
	}
}
