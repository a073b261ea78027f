// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// sleeper is the configuration of a model whose worker multiplies by scale.
func sleeper(name string, scale int, keys, workerKeys string) string {
	return fmt.Sprintf("[[model]]\nname = %q\ninputs = [\"x:f32[4]\"]\noutputs = [\"y:f32[4]\"]\nslots = 64\nmax_batch_size = 8\n"+
		"wait_time = \"0s\"\n%s\n[[model.worker]]\ncommand = [%q, \"worker\", \"affine\", \"--scale\", \"%d\", \"--input\", \"x:f32[4]\"]\n%s\n",
		name, keys, os.Args[0], scale, workerKeys)
}

// first has a shell run a command before the first worker of a configuration starts.
func first(config, command string) string {
	return strings.Replace(config, "command = [", fmt.Sprintf(`command = ["sh", "-c", %q, "sh", `, command+`; exec "$@"`), 1)
}

func (c *cli) staffing(model string) stats.Staffing {
	s := c.stats()
	if m := s.Model(model); m != nil && m.Staffing != nil {
		return *m.Staffing
	}
	return stats.Staffing{}
}

func (c *cli) untilState(model, state string) {
	c.t.Helper()
	c.until(model+" is "+state, func() bool { return c.staffing(model).State == state })
}

// askFor sends one request within a time, and returns the scale that answered.
func askFor(ctx context.Context, cl *client.Client, within time.Duration) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	outs, err := cl.Infer(ctx, []float32{1, 1, 1, 1})
	if err != nil {
		return 0, err
	}
	y, err := tensor.As[float32](outs[0])
	return int(y[0]), err
}

func (c *cli) dial(model string) *client.Client {
	c.t.Helper()
	cl, err := client.Dial(c.t.Context(), model, client.WithWindow(8))
	must.Do(c.t, err)
	c.t.Cleanup(func() { cl.Close() })
	return cl
}

func TestAnIdleModelSleepsAndTheNextRequestWakesIt(t *testing.T) {
	c := startCLIWith(t, sleeper("nap", 3, "idle = \"1s\"\nno_worker = \"refuse\"", "instances = 2"))
	c.until("nap has woken", func() bool { return c.staffing("nap").Wakes > 0 })
	cl := c.dial("nap")
	for range 3 {
		c.untilState("nap", "asleep")
		if pids := c.pids(); len(pids) > 0 {
			t.Errorf("a sleeping model has processes: %v", pids)
		}
		c.must("ready", "nap")
		if y, err := askFor(t.Context(), cl, patience); y != 3 || err != nil {
			t.Fatalf("a request to a sleeping model: %d, %v", y, err)
		}
	}
	if s := c.staffing("nap"); s.Wakes < 4 || s.Sleeps < 3 || s.WakeMS <= 0 || s.FailedWakes > 0 {
		t.Errorf("%+v", s)
	}
	if out := c.must("stats", "nap"); !strings.Contains(out, "woke") {
		t.Errorf("stats say nothing of it:\n%s", out)
	}
}

func TestAModelSleepsAndWakesByCommand(t *testing.T) {
	c := startCLIWith(t, sleeper("a", 2, "", "")+sleeper("pinned", 2, "keep = true", "")+sleeper("bare", 2, "", ""))
	c.must("ready", "--wait", "2m")
	if out := c.must("sleep", "a"); out != "asleep\n" || c.staffing("a").State != "asleep" || len(c.pids()) != 2 {
		t.Errorf("sleep: %q, %+v, processes %v", out, c.staffing("a"), c.pids())
	}
	c.must("sleep", "a")
	if y, err := askFor(t.Context(), c.dial("a"), patience); y != 2 || err != nil {
		t.Errorf("connect to a sleeping model: %d, %v", y, err)
	}
	var told stats.Staffing
	must.Do(t, json.Unmarshal([]byte(c.must("sleep", "a", "--json")), &told))
	if told.State != "asleep" || told.Why != "by hand" {
		t.Errorf("sleep --json: %+v", told)
	}
	if out := c.must("wake", "a"); out != "awake\n" || c.staffing("a").State != "awake" || len(c.pids()) != 3 {
		t.Errorf("wake: %q, %+v, processes %v", out, c.staffing("a"), c.pids())
	}
	for model, why := range map[string]string{"pinned": "keep = true", "none": "no such model"} {
		if out, code := c.run("sleep", model); code != 1 || !strings.Contains(out, why) {
			t.Errorf("sleep %s: %d, %s", model, code, out)
		}
	}
}

func TestRequestsOfAModelWhoseStartFailsEndWithTheReason(t *testing.T) {
	may := filepath.Join(t.TempDir(), "may")
	config := sleeper("m", 2, "idle = \"1s\"", "instances = [0, 1]")
	c := startCLIWith(t, strings.Replace(config, "command = [", fmt.Sprintf(`command = ["sh", "-c", "test -e %s && exec \"$@\" || exit 7", "sh", `, may), 1))
	c.until("it is declared", func() bool { return c.staffing("m").State == "asleep" })
	cl := c.dial("m")
	_, err := askFor(t.Context(), cl, patience)
	if !errors.Is(err, status.ErrNoWorker) || !strings.Contains(err.Error(), "exit status 7") {
		t.Fatalf("a request whose worker cannot start: %v", err)
	}
	began := time.Now()
	if _, err := askFor(t.Context(), cl, patience); !errors.Is(err, status.ErrNoWorker) && time.Since(began) < 5*time.Second {
		t.Errorf("the next one: %v", err)
	}
	if out, code := c.run("ready", "m"); (code == 0 || !strings.Contains(out, "exit status 7")) && c.staffing("m").Failed != "" {
		t.Errorf("ready after a start that failed: %s", out)
	}
	if out, code := c.run("wake", "m"); code != 1 || !strings.Contains(out, "exit status 7") {
		t.Errorf("wake: %d, %s", code, out)
	}
	must.Do(t, os.WriteFile(may, nil, 0o600))
	c.until("it starts once it can", func() bool {
		y, err := askFor(t.Context(), cl, patience)
		return y == 2 && err == nil
	})
}

func TestAStartThatHangsIsEndedByCommand(t *testing.T) {
	c := startCLIWith(t, first(sleeper("m", 2, "idle = \"1s\"", "instances = [0, 1]"), "exec sleep 1000"))
	c.untilState("m", "asleep")
	interrupted := c.start("wake", "m")
	c.untilState("m", "waking")
	interrupted.Signal(syscall.SIGTERM)
	says := "waiting for the answer of the broker at " + os.Getenv("RINGBATCH_SOCKET") + " was interrupted"
	if err := interrupted.Wait(patience); err == nil || !strings.Contains(interrupted.Log(), says) {
		t.Errorf("an interrupted wake: %v, %s", err, interrupted.Log())
	}
	c.must("sleep", "m")
	woken := c.start("wake", "m")
	c.untilState("m", "waking")
	c.until("its process runs", func() bool { return len(c.pids()) == 1 })
	if out := c.must("sleep", "m"); out != "asleep\n" || c.staffing("m").State != "asleep" || len(c.pids()) != 0 {
		t.Errorf("sleep: %q, %+v, processes %v", out, c.staffing("m"), c.pids())
	}
	if err := woken.Wait(patience); err == nil || !strings.Contains(woken.Log(), "put to sleep again") {
		t.Errorf("wake: %v, %s", err, woken.Log())
	}
}

func TestAModelThatSleepsDuringAReloadWakesAsItSays(t *testing.T) {
	may := filepath.Join(t.TempDir(), "may")
	c := startCLIWith(t, sleeper("m", 2, "", ""))
	c.until("it has a worker", func() bool { s := c.stats(); return len(s.Model("m").Workers) == 1 })
	c.reload(first(sleeper("m", 5, "", ""), "until test -e "+may+"; do sleep 0.05; done"))
	c.until("its replacement loads", func() bool { return len(c.pids()) == 2 })
	c.must("sleep", "m")
	if len(c.pids()) != 0 {
		t.Errorf("a sleeping model has processes: %v", c.pids())
	}
	must.Do(t, os.WriteFile(may, nil, 0o600))
	if y, err := askFor(t.Context(), c.dial("m"), patience); y != 5 || err != nil {
		t.Errorf("after that: %d, %v", y, err)
	}
}

func TestAModelLosesItsWorkersWhileTheyEnd(t *testing.T) {
	dir := t.TempDir()
	runs, may := filepath.Join(dir, "runs"), filepath.Join(dir, "may")
	config := sleeper("m", 2, "no_worker = \"refuse\"", "stop_time = \"5m\"\ninstances = [1, 2]")
	c := startCLIWith(t, first(config, "trap '' TERM; touch "+runs+"; until test -e "+may+"; do sleep 0.05; done; exit"))
	c.until("its process ignores SIGTERM", func() bool { _, err := os.Stat(runs); return err == nil })
	asleep := c.start("sleep", "m")
	c.untilState("m", "ending")
	config, _, _ = strings.Cut(config, "[[model.worker]]")
	c.reload(config)
	c.until("the file is read", func() bool { return c.staffing("m").Most == 0 })
	must.Do(t, os.WriteFile(may, nil, 0o600))
	if err := asleep.Wait(patience); err == nil || !strings.Contains(asleep.Log(), "starts no workers") {
		t.Errorf("sleep: %v, %s", err, asleep.Log())
	}
	c.until("they have ended", func() bool { return len(c.pids()) == 0 })
	if _, err := askFor(t.Context(), c.dial("m"), patience); !errors.Is(err, status.ErrNoWorker) {
		t.Errorf("a request after that: %v", err)
	}
}

func TestTwoModelsTakeTurnsInTheRoomOfOne(t *testing.T) {
	room := "gpus = [0]\nmemory = \"6GiB\""
	c := startCLIWith(t, "[[gpu]]\nnumber = 0\nmemory = \"10GiB\"\n"+sleeper("one", 1, "", room)+sleeper("two", 2, "", room)+
		sleeper("kept", 3, "keep = true", "gpus = [0]\nmemory = \"4GiB\""))
	c.untilState("one", "awake")
	c.untilState("kept", "awake")
	if s := c.staffing("two"); s.State != "asleep" {
		t.Errorf("two: %+v", s)
	}
	one, two := c.dial("one"), c.dial("two")
	busy, stop := context.WithCancel(t.Context())
	defer stop()
	done := make(chan error, 1)
	go func() { // keeps one busy: its turn lasts 10 s
		for busy.Err() == nil {
			if y, err := askFor(t.Context(), one, patience); y != 1 || err != nil {
				done <- fmt.Errorf("%d, %w", y, err)
				return
			}
			time.Sleep(time.Millisecond) // busy for the broker, and not for the cores
		}
		done <- nil
	}()
	// On a slow machine the first turn may be over already, or the client may see its deadline before the broker's end.
	if _, err := askFor(t.Context(), two, 700*time.Millisecond); errors.Is(err, status.ErrExpired) {
		if _, why, told := strings.Cut(err.Error(), "no worker attached: "); told && why != "kept, one held the room of GPU 0" {
			t.Errorf("the error does not name the holders of the room: %v", err)
		}
	} else if err != nil && !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a request that cannot wait: %v", err)
	}
	if y, err := askFor(t.Context(), two, patience); y != 2 || err != nil {
		t.Errorf("the other one: %d, %v", y, err)
	}
	c.untilState("one", "awake") // its requests go on waiting
	stop()
	if err := <-done; err != nil {
		t.Errorf("a request of the busy model: %v", err)
	}
	if s := c.staffing("kept"); s.Sleeps > 0 {
		t.Errorf("kept: %+v", s)
	}
}

// slow is a sleeper whose worker takes 50 ms for each request.
func slow(name, keys, workerKeys string) string {
	return strings.NewReplacer(`"affine", "--scale", "1",`, fmt.Sprintf(`"simulated", "--name", %q, "--simulated-fixed", "50ms", "--depth", "1",`, name),
		"max_batch_size = 8", "max_batch_size = 1").Replace(sleeper(name, 1, keys, workerKeys))
}

// keepBusy sends requests at once until the returned function is called.
func (c *cli) keepBusy(model string, atOnce int) (stop func()) {
	cl := c.dial(model)
	busy, stop := context.WithCancel(c.t.Context())
	for range atOnce {
		go func() {
			for busy.Err() == nil {
				if _, err := askFor(busy, cl, patience); err != nil && busy.Err() == nil {
					c.t.Errorf("under load: %v", err)
				}
			}
		}()
	}
	return stop
}

func TestWorkersFollowTheLoad(t *testing.T) {
	c := startCLIWith(t, slow("affine", "", "instances = [1, 3]"))
	c.untilState("affine", "awake")
	if s := c.staffing("affine"); s.Instances != 1 || s.Most != 3 {
		t.Errorf("%+v", s)
	}
	stop := c.keepBusy("affine", 8)
	c.until("more workers serve a queue that grows", func() bool { s := c.stats(); return len(s.Model("affine").Workers) == 3 })
	stop()
	if out, code := c.run("scale", "affine", "2"); code != 1 || !strings.Contains(out, "follows the load") {
		t.Errorf("scale: %d, %s", code, out)
	}
	must.Do(t, admin.New("").Restart(t.Context(), "affine"))
}

func TestFurtherWorkersGiveTheirRoomToAModelThatWaits(t *testing.T) {
	room := "gpus = [0]\nmemory = \"4GiB\""
	c := startCLIWith(t, "[[gpu]]\nnumber = 0\nmemory = \"10GiB\"\n"+slow("busy", "keep = true", "instances = [1, 2]\n"+room)+
		sleeper("other", 2, "idle = \"1s\"", room))
	c.untilState("other", "asleep")
	defer c.keepBusy("busy", 8)()
	c.until("the busy one has two workers", func() bool { s := c.stats(); return len(s.Model("busy").Workers) == 2 })
	if y, err := askFor(t.Context(), c.dial("other"), patience); y != 2 || err != nil {
		t.Errorf("the other one: %d, %v", y, err)
	}
}

func TestAPipelineSleepsAsAWhole(t *testing.T) {
	stage := func(name, in, out string, scale int) string {
		return fmt.Sprintf("[[model.stage]]\nname = %q\ninputs = [%q]\noutputs = [%q]\nmax_batch_size = 8\n[[model.stage.worker]]\n"+
			"command = [%q, \"worker\", \"affine\", \"--scale\", \"%d\", \"--input\", \"%s:f32[4]\"]\n", name, in, out+":f32[4]", os.Args[0], scale, in)
	}
	c := startCLIWith(t, "[[model]]\nname = \"pipe\"\ninputs = [\"x:f32[4]\"]\noutputs = [\"y_out\"]\nslots = 64\nidle = \"1s\"\n"+
		stage("first", "x", "y", 2)+stage("second", "y", "y_out", 3))
	c.until("it has woken", func() bool { return c.staffing("pipe").Wakes > 0 })
	cl := c.dial("pipe")
	for range 2 {
		c.untilState("pipe", "asleep")
		if pids := c.pids(); len(pids) > 0 {
			t.Errorf("a sleeping pipeline has processes: %v", pids)
		}
		if z, err := askFor(t.Context(), cl, patience); z != 6 || err != nil {
			t.Fatalf("a request to a sleeping pipeline: %d, %v\n%s", z, err, c.broker.Log())
		}
	}
	if out, code := c.run("sleep", "pipe/first"); code != 1 || !strings.Contains(out, "name the pipeline") {
		t.Errorf("sleep of a stage: %d, %s", code, out)
	}
}

func TestMoreWorkersAreRefusedWithoutRoom(t *testing.T) {
	room := "gpus = [0]\nmemory = \"4GiB\"\n"
	head := "[[gpu]]\nnumber = 0\nmemory = \"10GiB\"\n"
	c := startCLIWith(t, head+sleeper("a", 2, "", room)+sleeper("b", 2, "", room))
	c.untilState("a", "awake")
	c.untilState("b", "awake")
	if out, code := c.run("scale", "a", "2"); code != 1 || !strings.Contains(out, "GPU 0") {
		t.Errorf("scale beyond the free room: %d, %s", code, out)
	}
	c.reload(head + sleeper("a", 2, "", "instances = 2\n"+room) + sleeper("b", 2, "", room))
	c.until("the reload is refused", func() bool { return strings.Contains(c.broker.Log(), "more than is free of GPU 0") })
	c.reload(head + sleeper("a", 2, "", room) + sleeper("b", 2, "", room) +
		"[[worker]]\ncommand = [\"sleep\", \"1000\"]\ngpus = [0]\nmemory = \"6GiB\"\n")
	c.until("a worker of no model is refused", func() bool { return strings.Count(c.broker.Log(), "more than is free of GPU 0") == 2 })
	c.reload(strings.NewReplacer("10GiB", "20GiB", "4GiB", "15GiB").Replace(head + sleeper("a", 2, "", room)))
	c.until("the budget stays", func() bool {
		return strings.Contains(c.broker.Log(), "take 15360 MiB of GPU 0, whose budget leaves 10240 MiB")
	})
	if out, code := c.run("scale", "b", "3"); code != 1 || len(c.pids()) != 2 {
		t.Errorf("scale beyond the budget: %d, %s, processes %v", code, out, c.pids())
	}
	c.must("sleep", "b")
	c.must("scale", "a", "2")
	if held := c.staffing("a").Memory; len(held) != 1 || held[0].Bytes != 8<<30 {
		t.Errorf("two instances hold %+v", held)
	}
	for _, r := range []struct{ least, most, runs int }{{1, 2, 2}, {1, 1, 1}, {2, 3, 2}} {
		text := fmt.Sprintf("instances = [%d, %d]\n", r.least, r.most)
		c.reload(head + sleeper("a", 2, "", text+room) + sleeper("b", 2, "", room))
		c.until(text+"begins with what runs", func() bool {
			s := c.staffing("a")
			return s.Most == r.most && s.Instances == r.runs && s.Memory[0].Bytes == int64(r.runs)<<32 && len(c.pids()) == r.runs
		})
	}
}

func TestAReloadThatFailsDoesNotFreeRoom(t *testing.T) {
	room := "gpus = [0]\nmemory = \"6GiB\"\n"
	head, b := "[[gpu]]\nnumber = 0\nmemory = \"10GiB\"\n", sleeper("b", 2, "", room)
	c := startCLIWith(t, head+sleeper("a", 2, "", room)+b)
	c.untilState("a", "awake")
	c.reload(head + first(sleeper("a", 2, "", strings.Replace(room, "6", "2", 1)), "exit 7") + b)
	c.until("it has failed", func() bool { return strings.Contains(c.broker.Log(), "could not be changed") })
	if y, err := askFor(t.Context(), c.dial("b"), patience); y != 2 || err != nil || c.staffing("a").State == "awake" {
		t.Errorf("12 GiB of 10: %d, %v, a %+v", y, err, c.staffing("a"))
	}
}

func TestAKeptModelIsStartedAgainAfterAStartThatFails(t *testing.T) {
	may := filepath.Join(t.TempDir(), "may")
	config := sleeper("m", 2, "keep = true", "gpus = [0]\nmemory = \"4GiB\"")
	c := startCLIWith(t, "[[gpu]]\nnumber = 0\nmemory = \"10GiB\"\n"+
		strings.Replace(config, "command = [", fmt.Sprintf(`command = ["sh", "-c", "test -e %s && exec \"$@\" || exit 7", "sh", `, may), 1))
	c.until("its start has failed", func() bool { return c.staffing("m").FailedWakes > 0 })
	must.Do(t, os.WriteFile(may, nil, 0o600))
	c.untilState("m", "awake")
}

func TestRequestsThatAnExternalWorkerLeavesWakeTheModel(t *testing.T) {
	c := startCLIWith(t, sleeper("m", 2, "idle = \"1s\"", "instances = [0, 1]"))
	c.untilState("m", "asleep")
	w := c.start("worker", "simulated", "--name", "m", "--simulated-fixed", "20s", "--depth", "1", "--input", "x:f32[4]")
	c.until("it has attached", func() bool { s := c.stats(); return len(s.Model("m").Workers) == 1 })
	answered := make(chan error, 1)
	cl := c.dial("m")
	go func() {
		_, err := askFor(t.Context(), cl, patience)
		answered <- err
	}()
	c.until("it has the request", func() bool { s := c.stats(); return s.Model("m").SlotsRunning == 1 })
	w.Kill()
	if err := <-answered; err != nil {
		t.Error(err)
	}
}
