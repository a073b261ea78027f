// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/broker/supervise"
	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testlog"
)

// roleEnv makes the test binary, run again by the supervisor, a worker process. The worker
// attaches, looks for batches once the file of lookEnv exists, and ends on SIGTERM. A
// client attaches after SIGTERM, once that file exists.
const (
	roleEnv = "RINGBATCH_TEST_ROLE"
	lookEnv = "RINGBATCH_TEST_LOOK"
)

func TestMain(m *testing.M) {
	if os.Getenv(roleEnv) == "" {
		os.Exit(m.Run())
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if os.Getenv(roleEnv) == "successor" {
		takeOverUntil(os.Args[1], os.Args[2])
		return
	}
	if os.Getenv(roleEnv) == "connector" {
		connectThirdDescriptor(os.Args[1])
		return
	}
	if os.Getenv(roleEnv) == "client" {
		fmt.Println("the client waits")
		<-ctx.Done()
		fmt.Println("the client ends")
		patient, cancel := context.WithTimeout(context.Background(), patience)
		awaitLook(patient)
		cancel()
		req := &control.Request{Op: control.OpClient, Model: os.Getenv("RINGBATCH_MODEL"), Window: 1}
		attachOrExit(context.Background(), req).Close()
		fmt.Println("the client was served to its end")
		return
	}
	req := workerOf(os.Getenv("RINGBATCH_MODEL"))
	req.Name = os.Getenv("RINGBATCH_WORKER_NAME")
	s := attachOrExit(ctx, req)
	awaitLook(ctx)
	box := shm.NewMailbox(s.Words, 1, s.Layout.MaxBatch)
	for ctx.Err() == nil {
		box.Wait(&shm.Parker{}, box.Bell.Load(), 0, time.Second/100)
	}
	s.Close()
}

// workerOf is the attach request of a worker.
func workerOf(model string) *control.Request {
	info := control.WorkerInfo{Inputs: []string{"x:f32[4]"}, Outputs: []string{"y:f32[4]"}, Depth: 1}
	return &control.Request{Op: control.OpWorker, Model: model, Worker: &info}
}

func attachOrExit(ctx context.Context, req *control.Request) *attach.Session {
	s, err := attach.Open(ctx, control.SocketPath(""), req)
	if err != nil {
		fmt.Println(err)
		os.Exit(3)
	}
	return s
}

// awaitLook returns when the file of lookEnv exists, or at once without lookEnv.
func awaitLook(ctx context.Context) {
	for may := os.Getenv(lookEnv); may != "" && ctx.Err() == nil; time.Sleep(time.Millisecond) {
		if _, err := os.Stat(may); err == nil {
			return
		}
	}
}

// patience is how long anything may take here before it counts as stuck.
const patience = 2 * time.Minute

// supervised is a broker with one model and the workers given.
type supervised struct {
	t      *testing.T
	b      *Broker
	log    *testlog.Log
	stop   context.CancelFunc
	served chan error
}

func serve(t *testing.T, change func(*Config), workers ...supervise.Worker) *supervised {
	t.Helper()
	dir, err := os.MkdirTemp("", "rb")
	must.Do(t, err)
	s := &supervised{t: t, log: &testlog.Log{}, served: make(chan error, 1)}
	sig, err := tensor.ParseSignature([]string{"x:f32[4]"}, []string{"y:f32[4]"})
	must.Do(t, err)
	cfg := Config{
		Socket: filepath.Join(dir, "s", "b.sock"), DrainTime: time.Second, Logger: slog.New(slog.NewTextHandler(s.log, nil)),
		Models: []ModelConfig{{Name: "m", Signature: sig, Policy: policy.New(policy.Slots(64)), Workers: workers}},
	}
	if change != nil {
		change(&cfg)
	}
	if s.b, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	s.stop = cancel
	go func() { s.served <- s.b.Serve(ctx) }()
	t.Cleanup(func() { s.end(); os.RemoveAll(dir) })
	return s
}

// end stops the broker and waits for it.
func (s *supervised) end() {
	s.stop()
	select {
	case err := <-s.served:
		s.served <- err
	case <-time.After(patience):
		s.t.Fatal("the broker does not end")
	}
}

func (s *supervised) stats() stats.Broker { return s.b.Snapshot() }

// until waits for a condition.
func (s *supervised) until(what string, ok func(stats.Broker) bool) stats.Broker {
	s.t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		st := s.stats()
		if ok(st) {
			return st
		}
		if time.Now().After(end) {
			s.t.Fatalf("%s: never happened; processes %+v\n%s", what, st.Processes, s.log)
		}
	}
}

func worker() supervise.Worker {
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	return supervise.Worker{Command: []string{self}, Env: map[string]string{roleEnv: "worker"}}
}

func attached(n int) func(stats.Broker) bool {
	return func(st stats.Broker) bool { return len(st.Models) == 1 && len(st.Models[0].Workers) == n }
}

func TestADeclaredWorkerIsStartedAttachesAndIsStartedAgain(t *testing.T) {
	s := serve(t, nil, worker())
	first := s.until("the worker attaches", attached(1)).Models[0].Workers[0].Pid
	must.Do(t, syscall.Kill(first, syscall.SIGKILL))
	st := s.until("another one attaches", func(st stats.Broker) bool {
		return attached(1)(st) && st.Models[0].Workers[0].Pid != first && st.Processes[0].Pid != 0 // which may be noted after it attached
	})
	p, w := st.Processes[0], st.Models[0].Workers[0]
	if p.Restarts != 1 || w.Restarts != 1 || p.Pid != w.Pid || st.MPS != "off" {
		t.Errorf("process %+v, worker %+v, MPS %s", p, w, st.MPS)
	}
	s.end()
	if err := syscall.Kill(p.Pid, 0); err != syscall.ESRCH {
		t.Errorf("it outlives its broker: %v", err)
	}
}

// The broker starts the only worker of a model that nobody else uses again: the model stays,
// unless a worker declares it otherwise.
func TestAModelThatTheBrokerServesAgainIsNotForgotten(t *testing.T) {
	again := filepath.Join(t.TempDir(), "again")
	w := worker()
	w.Command = []string{"sh", "-c", `[ -e "$0" ] && until [ -e "$0.now" ]; do sleep 0.01; done; exec ` + w.Command[0], again}
	w.Env["RINGBATCH_MODEL"] = "d"
	s := serve(t, func(c *Config) { c.Models, c.Workers = nil, []supervise.Worker{w} })
	first := s.until("the worker attaches", attached(1)).Models[0].Workers[0].Pid
	must.Do(t, os.WriteFile(again, nil, 0o600))
	must.Do(t, syscall.Kill(first, syscall.SIGKILL))
	s.until("its worker has left", func(stats.Broker) bool { return strings.Contains(s.log.String(), "worker left") })
	client, err := attach.Open(t.Context(), s.b.Socket(), &control.Request{Op: control.OpClient, Model: "d", Window: 1})
	must.Do(t, err)
	client.Close()
	must.Do(t, os.WriteFile(again+".now", nil, 0o600))
	s.until("it is served again", func(st stats.Broker) bool { return attached(1)(st) && st.Models[0].Workers[0].Pid != first })
	if log := s.log.String(); strings.Contains(log, "forgotten") || strings.Count(log, "model ready") != 1 {
		t.Errorf("the model was made again:\n%s", log)
	}

	must.Do(t, os.Remove(again+".now"))
	must.Do(t, syscall.Kill(s.stats().Models[0].Workers[0].Pid, syscall.SIGKILL))
	s.until("its worker has left again", attached(0))
	other := workerOf("d")
	other.Worker.Inputs = []string{"x:f32[5]"}
	changed, err := attach.Open(t.Context(), s.b.Socket(), other)
	must.Do(t, err)
	changed.Close()
	s.until("a model of other workers is forgotten", func(st stats.Broker) bool { return len(st.Models) == 0 })
}

// A gateway, for one, has requests of others to finish.
func TestASupervisedClientEndsBeforeTheBrokerDrains(t *testing.T) {
	client := worker()
	client.Client, client.StopTime, client.Env = true, patience, map[string]string{roleEnv: "client"}
	s := serve(t, nil, worker(), client)
	s.until("both are there", func(st stats.Broker) bool {
		return attached(1)(st) && strings.Contains(s.log.String(), "the client waits")
	})
	s.end()
	if text := s.log.String(); !strings.Contains(text, "the client was served to its end") {
		t.Errorf("it was not:\n%s", text)
	}
}

func TestABrokerThatEndsItsClientsIsNotReloaded(t *testing.T) {
	look := filepath.Join(t.TempDir(), "look")
	client := worker()
	client.Client, client.StopTime, client.Env = true, patience, map[string]string{roleEnv: "client", lookEnv: look}
	s := serve(t, nil, client)
	says := func(text string) {
		s.until(text, func(stats.Broker) bool { return strings.Contains(s.log.String(), text) })
	}
	says("the client waits")
	s.stop()
	says("the client ends")
	if err := s.b.Reload(s.b.cfg); !errors.Is(err, status.ErrDraining) {
		t.Error(err)
	}
	must.Do(t, os.WriteFile(look, nil, 0o600))
	s.end()
}

func TestAnOldWorkerIsEndedOnlyWhenTheNewOneLooksForBatches(t *testing.T) {
	look := filepath.Join(t.TempDir(), "look")
	must.Do(t, os.WriteFile(look, nil, 0o600))
	w := worker()
	w.Env[lookEnv] = look
	s := serve(t, func(c *Config) { c.firstLookTime = time.Hour }, w)
	old := s.until("the worker attaches", attached(1)).Models[0].Workers[0].Pid
	must.Do(t, os.Remove(look))
	restarted := make(chan error, 1)
	go func() { restarted <- s.b.super.Restart(context.Background(), "m") }()
	s.until("its successor attaches", attached(2))
	select {
	case err := <-restarted:
		t.Fatalf("restarted before the new worker looked for batches: %v\n%s", err, s.log)
	case <-time.After(100 * time.Millisecond): // a restart that does not wait is quicker
	}
	if st := s.stats(); !attached(2)(st) {
		t.Fatalf("workers %+v; the old one is ended\n%s", st.Models[0].Workers, s.log)
	}
	must.Do(t, os.WriteFile(look, nil, 0o600))
	must.Do(t, <-restarted)
	s.until("the old one is gone", func(st stats.Broker) bool { return attached(1)(st) && st.Models[0].Workers[0].Pid != old })
}

func TestARefusedChangeOfWorkersIsNotLoggedAsDone(t *testing.T) {
	s := serve(t, nil)
	for _, req := range []control.Request{{Op: control.OpRestart, Model: "m"}, {Op: control.OpScale, Model: "m", Instances: 2}} {
		if err := s.b.changeWorkers(&req); !errors.Is(err, status.ErrInvalid) {
			t.Errorf("%s: %v", req.Op, err)
		}
	}
	if log := s.log.String(); strings.Contains(log, "replaced one by one") || strings.Contains(log, "processes changes") {
		t.Error(log)
	}
}

func TestANegativeNumberOfClientsIsRefused(t *testing.T) {
	_, err := New(Config{Socket: t.TempDir() + "/s/b", MaxClients: -1})
	must.Fail(t, "max_clients -1", err, status.ErrInvalid)
}

func TestAReloadThatDeclaresAModelTwiceIsRefusedWhole(t *testing.T) {
	s := serve(t, nil)
	for _, again := range []string{"m", "new"} {
		m := s.b.cfg.Models[0]
		m.Name, m.Policy = again, policy.New(policy.MaxBatchSize(8))
		if err := s.b.Reload(Config{Models: []ModelConfig{m, m}}); !errors.Is(err, status.ErrInvalid) {
			t.Errorf("%s twice: %v", again, err)
		}
	}
	if st := s.stats(); len(st.Models) != 1 || st.Models[0].MaxBatchSize != 32 {
		t.Errorf("it changed something: %+v", st.Models)
	}
}
