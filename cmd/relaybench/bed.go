// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/testbed"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
	"github.com/ringbatch/ringbatch/worker/cpu"
)

// bed is the processes: this host's broker and relays, four far hosts, and the
// bare server.
type bed struct {
	ctx        context.Context
	cancel     context.CancelFunc
	dir        string
	self       string
	ringbatch  string
	running    []*exec.Cmd
	kinds      map[*exec.Cmd]string // of the processes, for the account
	hosts      []string             // addresses of the far gateways
	bare       string
	ends       []func()
	relayFlags []string
	producer   []string // the program of the producers of small requests, if not this one
}

const farHosts = 4

func newBed(ctx context.Context, o *options) (b *bed, err error) {
	b = &bed{relayFlags: o.relayFlags, producer: strings.Fields(o.producer), kinds: map[*exec.Cmd]string{}}
	if b.dir, err = os.MkdirTemp("", "relaybench"); err != nil {
		return nil, err
	}
	b.ctx, b.cancel = context.WithCancel(ctx)
	defer func() {
		if err != nil {
			b.close()
		}
	}()
	if b.self, err = os.Executable(); err != nil {
		return nil, err
	}
	b.ringbatch = filepath.Join(filepath.Dir(b.self), "ringbatch")
	if _, err = b.start("local", b.ringbatch, "broker", "--log_level", "error"); err != nil {
		return nil, err
	}
	for i := range farHosts {
		name := fmt.Sprint("far", i)
		if _, err = b.start(name, b.ringbatch, "broker", "--log_level", "error"); err != nil {
			return nil, err
		}
		if _, err = b.start(name, b.self, "--role", "worker"); err != nil {
			return nil, err
		}
		out, err := b.start(name, b.ringbatch, "gateway", "--http", "off", "--grpc", "127.0.0.1:0", "--log_level", "error")
		if err != nil {
			return nil, err
		}
		address, err := out.Find("grpc ", 20*time.Second)
		if err != nil {
			return nil, err
		}
		b.hosts = append(b.hosts, address)
	}
	out, err := b.start("local", b.self, "--role", "bare")
	if err == nil {
		b.bare, err = out.Find("grpc ", 20*time.Second)
	}
	if err == nil {
		_, err = b.start("local", b.self, "--role", "local")
	}
	for _, model := range []string{"large", "small"} {
		if err == nil {
			err = b.relay(model, model, 1)
		}
	}
	for range o.relays - 1 {
		if err == nil {
			err = b.relay("small", "small", 1)
		}
	}
	return b, err
}

func (b *bed) close() {
	for _, end := range b.ends {
		end()
	}
	b.cancel()
	for _, c := range b.running {
		_ = c.Wait()
	}
	_ = os.RemoveAll(b.dir)
}

func (b *bed) socket(host string) string { return filepath.Join(b.dir, host, "b.sock") }

// start runs a process of a host.
func (b *bed) start(host, name string, args ...string) (*testbed.Printed, error) {
	if err := os.MkdirAll(filepath.Join(b.dir, host), 0o700); err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(b.ctx, name, args...)
	cmd.Env = append(os.Environ(), "RINGBATCH_SOCKET="+b.socket(host))
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out := &testbed.Printed{}
	cmd.Stdout, cmd.Stderr = out, os.Stderr
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	b.running = append(b.running, cmd)
	what := args[0]
	if what == "--role" {
		what = args[1]
	}
	side := "local"
	if host != "local" {
		side = "far"
	}
	b.kinds[cmd] = side + " " + what
	return out, nil
}

// relay serves a model of the first n hosts here.
func (b *bed) relay(model, remote string, n int) error {
	args := []string{"relay", model, "--remote_model", remote, "--to", strings.Join(b.hosts[:n], ","),
		"--wait_for_broker", "20s", "--log_level", "error"}
	out, err := b.start("local", b.ringbatch, append(args, b.relayFlags...)...)
	if err == nil {
		_, err = out.Find("relaying ", 20*time.Second)
	}
	return err
}

// producers are n clients of the ring here, each of so many goroutines.
func (b *bed) producers(model string, n, goroutines, size, answered int) (list []caller, err error) {
	wait, cancel := context.WithTimeout(b.ctx, 20*time.Second)
	defer cancel()
	input := bytes.Repeat([]byte{1, 2, 3, 4}, size/4)
	for range n {
		c, err := client.Dial(wait, model, client.WithSocket(b.socket("local")), client.WithWindow(goroutines), client.WaitForModel())
		if err != nil {
			return nil, err
		}
		b.ends = append(b.ends, func() { c.Close() })
		call := func(ctx context.Context) error {
			q, err := c.Claim(ctx, 1)
			if err != nil {
				return err
			}
			defer q.Release()
			in, err := q.InputBytes(0)
			if err != nil {
				return err
			}
			copy(in, input)
			if err := q.Commit(ctx); err != nil {
				return err
			}
			if err := q.Wait(ctx); err != nil {
				return err
			}
			out, err := q.OutputBytes(0)
			if err == nil && !bytes.Equal(out, input[:answered]) {
				err = errAnswer
			}
			return err
		}
		for range goroutines {
			list = append(list, call)
		}
	}
	return list, nil
}

var errAnswer = errors.New("not the answer")

// bareCallers call the bare server with messages of so many rows, over n
// connections, each of so many goroutines.
func (b *bed) bareCallers(model string, n, goroutines, rows, size, answered int) (list []caller, err error) {
	for range n {
		conn, err := grpc.NewClient(b.bare, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20), grpc.MaxCallSendMsgSize(64<<20)))
		if err != nil {
			return nil, err
		}
		b.ends = append(b.ends, func() { conn.Close() })
		service := oip.NewGRPCInferenceServiceClient(conn)
		request := &oip.ModelInferRequest{ModelName: model,
			Inputs:           []*oip.ModelInferRequest_InferInputTensor{{Name: "x", Datatype: "UINT8", Shape: []int64{int64(rows), int64(size)}}},
			RawInputContents: [][]byte{bytes.Repeat([]byte{1, 2, 3, 4}, rows*size/4)}}
		call := func(ctx context.Context) error {
			rep, err := service.ModelInfer(ctx, request)
			if err == nil && (len(rep.RawOutputContents) != 1 || len(rep.RawOutputContents[0]) != rows*answered) {
				err = errAnswer
			}
			return err
		}
		for range goroutines {
			list = append(list, call)
		}
	}
	return list, nil
}

// serveBare is what anybody would write with gRPC: it reads the whole message
// and answers as many bytes as the relay's far side would.
func serveBare(ctx context.Context) error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	s := grpc.NewServer(grpc.MaxRecvMsgSize(256<<20), grpc.InitialWindowSize(1<<20), grpc.InitialConnWindowSize(4<<20))
	oip.RegisterGRPCInferenceServiceServer(s, bareServer{})
	go func() { _ = s.Serve(l) }()
	fmt.Printf("grpc %s\n", l.Addr())
	<-ctx.Done()
	return nil
}

type bareServer struct {
	oip.UnimplementedGRPCInferenceServiceServer
}

func (bareServer) ModelInfer(_ context.Context, r *oip.ModelInferRequest) (*oip.ModelInferResponse, error) {
	rows, size := int(r.Inputs[0].Shape[0]), int(r.Inputs[0].Shape[1])
	n := size
	if size == largeBytes {
		n = answer
	}
	return &oip.ModelInferResponse{ModelName: r.ModelName, ModelVersion: "1",
		Outputs:           []*oip.ModelInferResponse_InferOutputTensor{{Name: "y", Datatype: "UINT8", Shape: []int64{int64(rows), int64(n)}}},
		RawOutputContents: [][]byte{r.RawInputContents[0][:rows*n]}}, nil
}

// begin answers with the beginning of the input.
func begin(_ context.Context, b *worker.Batch) error {
	for i := range b.Rows() {
		copy(b.Output(0).Bytes(i), b.Input(0).Bytes(i))
	}
	return nil
}

// serveLocal is a worker of this host that does what the far one does.
func serveLocal(ctx context.Context) error {
	sig, err := tensor.ParseSignature([]string{fmt.Sprintf("x:u8[%d]", smallBytes)}, []string{fmt.Sprintf("y:u8[%d]", smallBytes)})
	if err != nil {
		return err
	}
	return worker.Serve(ctx, worker.Config{Alone: true, Model: localKind, Signature: sig, WaitForBroker: 20 * time.Second, Policy: policy.New(policy.MaxBatchSize(producers), policy.WaitTime(0))}, begin)
}

// serveModels is a far host's worker: the answer is the beginning of the input;
// the model "slow" sleeps as long as a GPU would compute.
func serveModels(ctx context.Context) error {
	failed := make(chan error, 3)
	serve := func(name string, batch int, in, out string, fn worker.Func) {
		sig, err := tensor.ParseSignature([]string{in}, []string{out})
		if err != nil {
			failed <- err
			return
		}
		failed <- worker.Serve(ctx, worker.Config{Alone: true, Model: name, Signature: sig, WaitForBroker: 20 * time.Second, Policy: policy.New(policy.MaxBatchSize(batch), policy.WaitTime(0))}, fn)
	}
	go serve("large", batch, fmt.Sprintf("x:u8[%d]", largeBytes), fmt.Sprintf("y:u8[%d]", answer), begin)
	go serve("small", producers, fmt.Sprintf("x:u8[%d]", smallBytes), fmt.Sprintf("y:u8[%d]", smallBytes), begin)
	spec, err := tensor.ParseSpec(fmt.Sprintf("x:u8[%d]", smallBytes))
	if err != nil {
		return err
	}
	m, err := cpu.New("simulated", cpu.Options{Inputs: []tensor.Spec{spec}, FixedCost: 20 * time.Millisecond})
	if err != nil {
		return err
	}
	go serve("slow", batch, spec.String(), "y"+strings.TrimPrefix(spec.String(), "x"), m.Run)
	return <-failed
}
