// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/tensor"
)

// served is a configuration with worker processes of the broker's own.
func (c *cli) served(scale, instances, spares int) string {
	text := fmt.Sprintf("%s\n[[model.worker]]\ncommand = [%q, \"worker\", \"affine\", \"--scale\", \"%d\", "+
		"\"--input\", \"x:f32[4]\"]\ninstances = %d\n", firstConfig, c.bin, scale, instances)
	if spares > 0 {
		text += fmt.Sprintf("spares = %d\n", spares)
	}
	return text
}

// reload has the broker read another configuration.
func (c *cli) reload(config string) {
	c.write(config)
	c.broker.Signal(syscall.SIGHUP)
}

// traffic sends requests until it is ended; each has to be answered, by a worker
// that multiplies by one of the scales.
type traffic struct {
	t       *testing.T
	stop    chan struct{}
	done    sync.WaitGroup
	answers atomic.Int64
	last    atomic.Int64 // the scale that answered last
}

func (c *cli) load(callers int, options ...client.Option) *traffic {
	c.t.Helper()
	l := &traffic{t: c.t, stop: make(chan struct{})}
	cl, err := client.Dial(c.t.Context(), "affine", append([]client.Option{client.WithWindow(callers)}, options...)...)
	must.Do(c.t, err)
	for range callers {
		l.done.Go(func() {
			for {
				select {
				case <-l.stop:
					return
				default:
				}
				outs, err := cl.Infer(c.t.Context(), []float32{1, 1, 1, 1})
				if err != nil {
					c.t.Errorf("after %d answers: %v", l.answers.Load(), err)
					return
				}
				y, _ := tensor.As[float32](outs[0])
				l.answers.Add(1)
				l.last.Store(int64(y[0]))
			}
		})
	}
	c.t.Cleanup(func() { l.end(); cl.Close() })
	c.until("the load runs", func() bool { return l.answers.Load() > 0 || c.t.Failed() })
	return l
}

func (l *traffic) end() {
	select {
	case <-l.stop:
	default:
		close(l.stop)
	}
	l.done.Wait()
}

// pids are those of the model's processes that run.
func (c *cli) pids() (list []int) {
	for _, p := range c.stats().Processes {
		if p.State == "running" {
			list = append(list, p.Pid)
		}
	}
	slices.Sort(list)
	return list
}

func TestWorkersAreRestartedScaledAndChangedUnderLoadWithoutALostRequest(t *testing.T) {
	c := startCLI(t)
	c.reload(c.served(2, 2, 0))
	c.must("ready", "affine", "--wait", "2m")
	c.until("both processes run", func() bool { return len(c.stats().Models[0].Workers) == 2 })
	l := c.load(4)

	before := c.pids()
	c.must("restart", "affine")
	if after := c.pids(); len(after) != 2 || slices.ContainsFunc(after, func(p int) bool { return slices.Contains(before, p) }) {
		t.Errorf("restart: processes %v became %v", before, after)
	}
	for _, n := range []int{4, 1} {
		c.must("scale", "affine", fmt.Sprint(n))
		if got := c.pids(); len(got) != n {
			t.Errorf("scale %d: processes %v", n, got)
		}
	}
	c.reload(c.served(3, 2, 0)) // another command, another number
	c.until("the changed command answers", func() bool { return l.last.Load() == 3 || t.Failed() })
	c.until("both of the new ones run", func() bool { return len(c.pids()) == 2 })
	// Another environment, then another GPU.
	env := strings.Replace(c.served(3, 2, 0), fmt.Sprintf("command = [%q,", c.bin),
		fmt.Sprintf(`command = ["sh", "-c", "shift 4; exec %s worker affine --scale $SCALE $@", "sh",`, c.bin), 1)
	c.reload(env + "env = { SCALE = \"4\" }\n")
	c.until("the command with the environment answers", func() bool { return l.last.Load() == 4 || t.Failed() })
	c.reload(env + "env = { SCALE = \"5\" }\n")
	c.until("the changed environment answers", func() bool { return l.last.Load() == 5 || t.Failed() })
	c.reload(env + "env = { SCALE = \"5\" }\ngpus = [1]\n")
	c.until("both have the other GPU", func() bool {
		gpus := 0
		for _, p := range c.stats().Processes {
			if p.State == "running" && p.GPU != nil && *p.GPU == 1 {
				gpus++
			}
		}
		return gpus == 2 && len(c.pids()) == 2 || t.Failed()
	})
	c.reload(strings.Replace(c.served(3, 2, 0), `"--scale"`, `"--no-such-flag"`, 1)) // workers that do not start
	c.until("that is said", func() bool { return strings.Contains(c.broker.Log(), "those that ran go on") })
	n := l.answers.Load()
	c.until("the old ones still answer", func() bool { return l.answers.Load() > n+100 || t.Failed() })
	l.end()
	var m stats.Model
	c.until("the broker has heard of every end", func() bool { // workers answer clients first, then the broker
		m = c.stats().Models[0]
		return m.Ended["OK"] == m.Requests
	})
	if uint64(l.answers.Load()) != m.Requests {
		t.Errorf("%d answers; the broker counts %v of %d", l.answers.Load(), m.Ended, m.Requests)
	}
}

func TestASpareTakesThePlaceOfAKilledWorker(t *testing.T) {
	c := startCLI(t)
	c.reload(c.served(2, 1, 1))
	worker := func(state string) (w stats.Worker) {
		for _, w := range c.stats().Models[0].Workers {
			if w.State == state || state == "serving" && w.State != "spare" {
				return w
			}
		}
		return w
	}
	c.until("one serves and one is spare", func() bool { return worker("serving").Pid > 0 && worker("spare").Pid > 0 })
	l := c.load(2)
	spare, served := worker("spare"), worker("serving")
	if spare.Batches != 0 {
		t.Errorf("the spare has run %d batches", spare.Batches)
	}
	must.Do(t, syscall.Kill(served.Pid, syscall.SIGKILL))
	c.until("the spare serves", func() bool { return worker("serving").Pid == spare.Pid })
	c.until("who killed it is not claimed", func() bool { return strings.Contains(c.broker.Log(), "killed by SIGKILL, not by the broker") })
	if log := c.broker.Log(); strings.Contains(log, `msg="worker killed"`) {
		t.Errorf("the broker says that it killed the worker:\n%s", log)
	}
	n := l.answers.Load()
	c.until("it answers", func() bool { return l.answers.Load() > n+100 || t.Failed() })
	c.until("the other comes back as the spare", func() bool {
		w := worker("spare")
		return w.Pid != 0 && w.Pid != spare.Pid &&
			w.Pid != served.Pid
	})
	l.end()
}

func TestWhatIsSavedSurvivesARestartOfTheBroker(t *testing.T) {
	c := startCLI(t)
	c.savesFor(c.config + ".saved")
}

// A service may not write where root's systemd reads its configuration.
func TestAServiceSavesInItsStateDirectory(t *testing.T) {
	state := t.TempDir()
	t.Setenv("STATE_DIRECTORY", state+":/no/such/folder")
	c := startCLI(t)
	c.savesFor(filepath.Join(state, "ringbatch.toml.saved"))
	if _, err := os.Stat(c.config + ".saved"); !os.IsNotExist(err) {
		t.Errorf("beside the configuration: %v", err)
	}
}

// savesFor changes and saves settings, restarts the broker, and finds them in force and
// in this file.
func (c *cli) savesFor(file string) {
	t := c.t
	t.Helper()
	c.reload(c.served(2, 1, 0))
	c.until("it is served", func() bool { return len(c.stats().Models[0].Workers) == 1 })
	for _, args := range [][]string{{"set", "affine", "wait_time=9ms", "--save"}, {"set", "affine", "lease=7s"}, {"scale", "affine",
		"2", "--save"}} {
		c.must(args...)
	}
	c.ends(c.broker)
	c.broker = c.start("broker", "--config", c.config, "--log-level", "warn")
	c.until("two workers attach", func() bool {
		out, code := c.run("stats", "--json")
		return code == 0 && strings.Contains(out, `"wait_time_ms": 9`) && len(c.stats().Models[0].Workers) == 2
	})
	if p := c.stats().Models[0].Policy; p["wait_time"] != "9ms" || p["lease"] != "30s" {
		t.Errorf("after the restart: %v", p)
	}
	text, err := os.ReadFile(file)
	if err != nil || !strings.Contains(string(text), `wait_time = "9ms"`) || !strings.Contains(string(text), "instances = 2") {
		t.Errorf("saved: %v\n%s", err, text)
	}
}

// brokerComesAndGoes has callers that retry see nothing of what happens to the
// broker.
func (c *cli) brokerComesAndGoes(what string, change func()) {
	c.t.Helper()
	w := c.start("worker", "affine", "--scale", "2", "--input", "x:f32[4]", "--wait", "1m")
	defer c.ends(w)
	l := c.load(4, client.WithRetry(time.Minute))
	for range 2 {
		change()
		n := l.answers.Load()
		c.until("answers come again after "+what, func() bool { return l.answers.Load() > n+100 || c.t.Failed() })
	}
	l.end()
}

func TestARestartOrADeathOfTheBrokerIsAPauseForClientsThatRetry(t *testing.T) {
	c := startCLI(t)
	again := func() {
		c.broker = c.start("broker", "--config", c.config, "--log-level", "warn")
	}
	c.brokerComesAndGoes("SIGTERM", func() {
		c.ends(c.broker)
		again()
	})
	c.brokerComesAndGoes("a take-over", func() {
		old := c.broker
		c.broker = c.start("broker", "--config", c.config, "--log-level", "warn", "--take-over")
		if err := old.Wait(patience); err != nil { // by itself, and well
			t.Errorf("the old broker: %v\n%s", err, old.Log())
		}
	})
	c.brokerComesAndGoes("kill -9", func() {
		c.broker.Signal(syscall.SIGKILL)
		_ = c.broker.Wait(patience)
		again()
	})
}
