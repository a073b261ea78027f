// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/client/ringbatchtest"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

// thePipeline has three stages, each with its own worker processes.
var thePipeline = testbed.Model{Name: "m", Slots: 64, MaxBatch: 8, Wait: time.Millisecond, Lease: lease, Stages: 3}

// commandStage is the place, in a row with a command, of the command's stage.
const commandStage = 3

// playStage serves one stage.
func playStage(c *testbed.Child, j job) error {
	w := obedient{say: func(what string) { _ = c.Tell(what, nil) }}
	if j.Do == "patiently" {
		w.patience = make(chan os.Signal, 1)
		signal.Notify(w.patience, syscall.SIGUSR1)
	}
	cfg := j.Model.StageConfig(j.Stage, j.Socket)
	return worker.Serve(c.Context(), cfg, func(ctx context.Context, b *worker.Batch) error { return w.obeyAt(j.Model, j.Stage, b) })
}

// obeyAt is obey for a stage.
func (w *obedient) obeyAt(m testbed.Model, stage int, b *worker.Batch) error {
	for i := range b.Rows() {
		if x := worker.Row[int64](b.Input(0), i); x[0] == cmdAnswer || x[commandStage] == int64(stage) {
			w.command(b, i, x)
		}
		m.RunStage(stage, b, i)
	}
	return nil
}

// stages starts a worker of each stage, in order.
func (h *host) stages(m testbed.Model, do string) (list []*proc) {
	h.t.Helper()
	for k := 1; k <= m.Stages; k++ {
		list = append(list, h.stage(m, k, do))
	}
	return list
}

func (h *host) stage(m testbed.Model, k int, do string) *proc {
	h.t.Helper()
	p := h.newStage(m, k, do)
	h.eventually("worker attached", func() error { _, err := h.workerStats(m.Name+"/"+m.StageName(k), p); return err })
	return p
}

// newStage does not wait for the worker, which may die of its first request.
func (h *host) newStage(m testbed.Model, k int, do string) *proc {
	h.t.Helper()
	return h.start(testbed.Spec{Role: "stage", Job: job{Socket: h.socket, Model: m, Stage: k, Do: do}})
}

// command sends a command to the worker of a stage.
func command(ctx context.Context, c *client.Client, stage int, cmd, arg int64) asking {
	x := make([]int64, testbed.Width)
	for j := range x {
		x[j] = nonce.Add(1) << 20
	}
	x[0], x[2], x[commandStage] = cmd, arg, int64(stage)
	ch := make(asking, 1)
	go func() { ch <- testbed.Ask(ctx, c, x, testbed.Width) }()
	return ch
}

func TestARequestGoesThroughAllStagesAndTheirStatisticsTellOfEach(t *testing.T) {
	h := newHost(t, thePipeline)
	h.stages(thePipeline, "")
	c := h.dial(client.WithWindow(24))
	works(t, c, 200)
	for _, rows := range []int{2, 5, 8} {
		must.Check(t, ask(background(t), c, cmdAnswer, 0, rows))
	}
	must.Fail(t, "more rows than a batch", ask(background(t), c, cmdAnswer, 0, 9), status.ErrTooLarge)
	c.Close()
	h.settled()
	whole := h.model("m")
	if whole.Requests < 203 || whole.Ended["OK"] != 203 || whole.Rows != 215 || len(whole.Stages) != 3 || whole.ReadyWorkers != 1 ||
		len(whole.Workers) != 0 {
		t.Errorf("%+v", whole)
	}
	for _, name := range whole.Stages {
		if s := h.model(name); s.Ended["OK"] != 203 || s.Rows != 215 || len(s.Workers) != 1 || s.Batches == 0 {
			t.Errorf("%s: %+v", name, s)
		}
	}
	h.stop()
}

func TestAWorkerKilledInAnyStageCostsNoRequestAndRepeatsNoOtherStage(t *testing.T) {
	h := newHost(t, thePipeline)
	all := h.stages(thePipeline, "patiently")
	c := h.dial()
	for k := 1; k <= 3; k++ {
		slow := command(background(t), c, k, cmdSlow, 1)
		all[k-1].expect("slow")
		second := h.stage(thePipeline, k, "patiently")
		all[k-1].Kill()
		second.expect("slow") // at this stage, from the same bytes
		second.Signal(syscall.SIGUSR1)
		slow.ends(t, nil)
	}
	c.Close()
	h.settled()
	for k := 1; k <= 3; k++ {
		if s := h.model("m/" + thePipeline.StageName(k)); s.Requeued != 1 || s.WorkersLost != 1 || s.Ended["OK"] != 3 || s.Requests != 3 {
			t.Errorf("stage %d: requeued %d, lost %d workers, %d requests, ended %v", k, s.Requeued, s.WorkersLost, s.Requests, s.Ended)
		}
	}
}

func TestAPoisonousRequestOfALaterStageFailsThere(t *testing.T) {
	h := newHost(t, thePipeline)
	all := h.stages(thePipeline, "")
	c := h.dial()
	poison := command(background(t), c, 2, cmdPoison, 0)
	for range 3 { // max_attempts, of that stage
		all[1].expect("poisoned")
		_ = all[1].end()
		all[1] = h.newStage(thePipeline, 2, "")
	}
	poison.ends(t, status.ErrWorkerDied)
	works(t, c, 10)
	c.Close()
	h.settled()
	if s := h.model("m/s1"); s.Requeued != 0 || s.WorkersLost != 0 {
		t.Errorf("%+v", s)
	}
}

func TestARequestThatFailsInTheMiddleEndsThereAndItsNeighboursGoOn(t *testing.T) {
	m := thePipeline
	m.Wait = 20 * time.Millisecond // so that they share a batch
	h := newHost(t, m)
	h.stages(m, "")
	c := h.dial()
	var good []asking
	bad := command(background(t), c, 2, cmdFail, 0)
	for range 5 {
		good = append(good, askLater(background(t), c, cmdAnswer, 0))
	}
	bad.ends(t, status.ErrFailed)
	for _, a := range good {
		a.ends(t, nil)
	}
	c.Close()
	h.settled()
	if s, last := h.model("m/s2"), h.model("m/s3"); s.Ended["Failed"] != 1 || s.Requests != 6 || last.Requests != 5 {
		t.Errorf("%+v, then %d", s.Ended, last.Requests)
	}
}

func TestDeadlineCancelAndDeathOfTheClientCountInEveryStage(t *testing.T) {
	h := newHost(t, thePipeline)
	all := h.stages(thePipeline, "patiently")
	c := h.dial()
	inStage := func(k, n int) {
		t.Helper()
		h.until("the queue of the stage", "m/"+thePipeline.StageName(k), func(s stats.Model) bool { return s.QueueLength == n })
	}
	for k := 1; k <= 3; k++ {
		name := "m/" + thePipeline.StageName(k)
		// The stage's only worker takes two batches at once, so that others wait.
		busy := []asking{command(background(t), c, k, cmdSlow, 1)}
		all[k-1].expect("slow")
		ctx, cancel := context.WithCancel(context.Background())
		canceledRunning := busy[0]
		// A request expires in this stage's queue. On a slow machine a short deadline
		// passes in an earlier stage.
		for wait, there := 300*time.Millisecond, false; !there; wait *= 2 {
			short, end := context.WithTimeout(context.Background(), wait)
			expires := command(short, c, k, cmdAnswer, 0)
			for ; !there && len(expires) == 0; time.Sleep(time.Millisecond) {
				there = h.model(name).QueueLength == 1
			}
			if err := <-expires; !errors.Is(err, status.ErrExpired) && (there || !errors.Is(err, status.ErrOverloaded)) {
				t.Errorf("a request in stage %d ended with %v at its deadline", k, err)
			}
			end()
		}
		inStage(k, 0)
		// A request is canceled in the queue.
		gone := command(ctx, c, k, cmdAnswer, 0)
		inStage(k, 1)
		cancel()
		gone.ends(t, status.ErrCanceled)
		inStage(k, 0)
		// A client dies whose request is in the queue.
		dying := h.start(testbed.Spec{Role: "client", Job: job{Socket: h.socket, Model: thePipeline, Do: testbed.StepCommit}})
		dying.expect(testbed.StepCommit)
		inStage(k, 1)
		dying.Kill()
		inStage(k, 0)
		all[k-1].Signal(syscall.SIGUSR1)
		canceledRunning.ends(t, nil)
		// A request is canceled while the worker has it.
		running, stop := context.WithCancel(context.Background())
		held := command(running, c, k, cmdSlow, 1)
		all[k-1].expect("slow")
		stop()
		held.ends(t, status.ErrCanceled)
		all[k-1].Signal(syscall.SIGUSR1)
		works(t, c, 5)
		// A client dies while the worker has its request.
		dying = h.start(testbed.Spec{Role: "client", Job: job{Socket: h.socket, Model: thePipeline, Do: "wait", Stage: k}})
		all[k-1].expect("slow")
		dying.Kill()
		all[k-1].Signal(syscall.SIGUSR1)
		works(t, c, 5)
		s := h.model(name)
		// The broker may see the last answer before the death, and a client whose
		// deadline passed cancels.
		if n := s.Ended["Expired"] + s.Ended["Canceled"]; n < 3 {
			t.Errorf("%s: %v", name, s.Ended)
		}
	}
	c.Close()
	h.settled()
}

func TestADrainingBrokerFinishesWhatIsInAnyStage(t *testing.T) {
	h := newHost(t, thePipeline)
	all := h.stages(thePipeline, "patiently")
	c := h.dial()
	asked := make([]asking, 3)
	for k := 3; k >= 1; k-- { // the last stage first: requests do not pass a stopped stage
		asked[k-1] = command(background(t), c, k, cmdSlow, 1)
		all[k-1].expect("slow")
	}
	h.broker.Signal(syscall.SIGTERM)
	h.draining()
	must.Fail(t, "accepted while draining", ask(background(t), c, cmdAnswer, 0, 1), status.ErrDraining)
	for k := 2; k >= 0; k-- {
		all[k].Signal(syscall.SIGUSR1)
		asked[k].ends(t, nil)
	}
	h.drained()
	c.Close()
}

func TestAPolicyIsSetForAStageAndNotForThePipeline(t *testing.T) {
	h := newHost(t, thePipeline)
	a := admin.New(h.socket)
	ctx := background(t)
	must.Do(t, a.Set(ctx, "m/s2", map[string]string{"wait_time": "7ms", "max_batch_size": "4"}))
	if s := h.model("m/s2"); s.Policy["wait_time"] != "7ms" || h.model("m/s1").Policy["wait_time"] != "1ms" ||
		h.model("m").MaxBatchSize != 4 {
		t.Errorf("%v", s.Policy)
	}
	for name, want := range map[string]error{"m": status.ErrInvalid, "m/s9": status.ErrUnknownModel, "m/": status.ErrUnknownModel,
		"x/s2": status.ErrUnknownModel} {
		must.Fail(t, name, a.Set(ctx, name, map[string]string{"wait_time": "7ms"}), want)
	}
	must.Fail(t, "private", a.Set(ctx, "m/s2", map[string]string{"private": "true"}), status.ErrInvalid)
	w := worker.Config{Socket: h.socket, Model: "m", Signature: thePipeline.Signature()}
	_, err := worker.Attach(ctx, w)
	must.Fail(t, "a worker of the whole pipeline", err, status.ErrInvalid)
	w.Model = "m/s2"
	_, err = worker.Attach(ctx, w)
	must.Fail(t, "a worker of another signature", err, status.ErrSignatureMismatch)
}

const declared = `{"inputs": ["x:i64[16]"], "policy": {"slots": "64", "max_batch_size": "8"}, "stages": [
	{"name": "s1", "inputs": ["x"], "outputs": ["h1:i64[16]"], "policy": {"max_batch_size": "4"}},
	{"name": "s2", "inputs": ["x", "h1"], "outputs": ["h2:i64[16]"]},
	{"name": "s3", "inputs": ["x", "h2"], "outputs": ["y:i64[16]"]}]}`

func TestWorkersDeclareAPipelineThatGoesWithTheLastOfThem(t *testing.T) {
	h := newHost(t) // no models
	var leave []func() error
	for k := 3; k >= 1; k-- {
		cfg := thePipeline.StageConfig(k, h.socket)
		cfg.Pipeline = declared
		leave = append(leave, ringbatchtest.Serve(cfg, func(_ context.Context, b *worker.Batch) error {
			for i := range b.Rows() {
				thePipeline.RunStage(k, b, i)
			}
			return nil
		}))
	}
	c := h.dial()
	works(t, c, 30)
	if m := c.Model(); m.MaxBatchSize != 4 {
		t.Errorf("%+v", m)
	}
	for text, want := range map[string]error{
		"{": status.ErrInvalid, `{"stages": []}`: status.ErrInvalid,
		`{"inputs": ["x:i64[1]"], "stages": [{"name": "s1", "inputs": ["x"], "outputs": ["y:i64[1]"]}]}`: status.ErrSignatureMismatch,
	} {
		cfg := thePipeline.StageConfig(1, h.socket)
		cfg.Pipeline = text
		_, err := worker.Attach(background(t), cfg)
		must.Fail(t, text, err, want)
	}
	c.Close()
	for _, end := range leave {
		if err := end(); !errors.Is(err, context.Canceled) {
			must.Check(t, err)
		}
	}
	h.eventually("the broker forgets the pipeline", func() error {
		if n := len(h.stats().Models); n != 0 {
			return fmt.Errorf("%d lines", n)
		}
		return nil
	})
	h.settled()
}
