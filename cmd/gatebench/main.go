// SPDX-License-Identifier: Apache-2.0

// Command gatebench measures what the gateway adds to the network: ratios
// against a bare server of the same library that reads the same messages and
// answers with as many bytes, in turns in one run.
//
//	go build -o bin/ ./cmd/ringbatch ./cmd/gatebench && bin/gatebench
package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/testbed"
)

// aims of issue and documentation alike: docs/gateway.md.
const (
	aimSmall   = 0.70 // of the bare server's requests/s, 64 bytes, 32 callers
	aimLarge   = 0.75 // of its bytes/s, 602,112 bytes
	aimLatency = 1.3  // added latency at one caller, in ringbatch requests
	aimP99     = 2.0  // × the bare server's, open loop at 80 %
)

// size is what is sent and answered.
type size struct {
	name     string
	elements int // float32 in
	answer   int // float32 out
	model    string
}

var sizes = []size{
	{"64 bytes", 16, 16, "small"},
	{"602,112 bytes", 3 * 224 * 224, 1000, "large"},
}

type options struct {
	seconds float64
	rounds  int
	callers int
	only    string
	size    string
	part    string
	json    string
	checks  testbed.Checks
}

func main() {
	o := options{}
	role := pflag.String("role", "", "internal: bare or worker")
	pflag.Float64Var(&o.seconds, "seconds", 1, "length of one turn")
	pflag.IntVar(&o.rounds, "rounds", 5, "turns of each")
	pflag.IntVar(&o.callers, "callers", 32, "callers at once")
	pflag.StringVar(&o.only, "only", "", "http or grpc")
	pflag.StringVar(&o.size, "size", "", "small or large")
	pflag.StringVar(&o.part, "part", "", "closed, one or open")
	pflag.StringVar(&o.json, "json", "", "write the results to this file")
	pflag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	var err error
	switch *role {
	case "bare":
		err = serveBare(ctx)
	case "worker":
		err = serveModels(ctx)
	default:
		err = run(ctx, &o)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "gatebench:", err)
		os.Exit(1)
	}
}

// run starts everything, measures, and prints.
func run(ctx context.Context, o *options) error {
	dir, err := os.MkdirTemp("", "gatebench")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	self, err := os.Executable()
	if err != nil {
		return err
	}
	_ = os.Setenv("RINGBATCH_SOCKET", filepath.Join(dir, "b.sock"))
	ctx, cancel := context.WithCancel(ctx)
	var running []*exec.Cmd
	defer func() {
		cancel()
		for _, c := range running {
			_ = c.Wait()
		}
	}()
	start := func(name string, args ...string) (*testbed.Printed, error) {
		cmd := exec.CommandContext(ctx, name, args...)
		cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
		cmd.WaitDelay = 10 * time.Second
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		out := &testbed.Printed{}
		cmd.Stdout, cmd.Stderr = out, os.Stderr
		if err := cmd.Start(); err != nil {
			return nil, err
		}
		running = append(running, cmd)
		return out, nil
	}
	ringbatch := filepath.Join(filepath.Dir(self), "ringbatch")
	if _, err := start(ringbatch, "broker", "--log_level", "error"); err != nil {
		return err
	}
	if _, err := start(self, "--role", "worker"); err != nil {
		return err
	}
	for _, s := range sizes { // until the models are there
		wait, done := context.WithTimeout(ctx, 20*time.Second)
		c, err := client.Dial(wait, s.model, client.WaitForModel())
		done()
		if err != nil {
			return err
		}
		c.Close()
	}
	bare, err := start(self, "--role", "bare")
	if err != nil {
		return err
	}
	gate, err := start(ringbatch, "gateway", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0")
	if err != nil {
		return err
	}
	pid := func(i int) int { return running[i].Process.Pid }
	b, g := server{name: "bare", pids: []int{pid(2), os.Getpid()}}, server{name: "gateway", pids: []int{pid(3), pid(0), pid(1), os.Getpid()}}
	for _, s := range []struct {
		out *testbed.Printed
		to  *server
	}{{bare, &b}, {gate, &g}} {
		if s.to.http, err = s.out.Find("http ", 20*time.Second); err == nil {
			s.to.grpc, err = s.out.Find("grpc ", 20*time.Second)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", s.to.name, err)
		}
	}
	fmt.Printf("%d cores, %s, %d callers, %d turns of %.1f s each\n\n", runtime.NumCPU(), runtime.Version(), o.callers, o.rounds, o.seconds)
	for _, protocol := range []string{"http", "grpc"} {
		if o.only == "" || strings.HasPrefix(o.only, protocol) {
			if err := measure(ctx, o, protocol, &b, &g); err != nil {
				return err
			}
		}
	}
	return o.checks.Write(o.json, "gateway")
}

// server is where one of the two listens, and the processes that it is.
type server struct {
	name, http, grpc string
	pids             []int
	spent            string // CPU time per request, of each process
}

func (s *server) address(protocol string) string {
	if protocol == "http" {
		return s.http
	}
	return s.grpc
}
