// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/broker/supervise"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

// Models that share the room of a GPU, which need not be there.
const (
	sleepers     = 8
	sleeperBytes = 1 << 30
	sleeperRoom  = 3 * sleeperBytes
	sleeperIdle  = 2 * time.Second
	mostStart    = 300 * time.Millisecond
	failedStarts = 10 // percent
	brokenStarts = 80 // of the last model, whose start often fails for good
	napPatience  = time.Minute
)

func sleeper(i int) testbed.Model {
	m := theModel
	m.Name, m.Slots = fmt.Sprint("sleeper", i), 64
	return m
}

// sleeperEnv makes this program a worker of a sleeper, as the broker's supervisor starts it. Its
// value is the percentage of starts that fail.
const sleeperEnv = "RINGBATCH_CHAOS_SLEEPER"

// PlaySleeper runs a worker that the supervisor started, and exits; in any other process it
// does nothing. Some starts fail, and all take a while.
func PlaySleeper() {
	if os.Getenv(sleeperEnv) == "" {
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	time.Sleep(rand.N(mostStart))
	if fails, _ := strconv.Atoi(os.Getenv(sleeperEnv)); rand.N(100) < fails {
		os.Exit(3)
	}
	m := theModel
	m.Name, m.Slots = os.Getenv("RINGBATCH_MODEL"), 64
	w, err := worker.Attach(ctx, m.WorkerConfig(""))
	if err != nil {
		os.Exit(4)
	}
	p := &player{}
	for {
		b, err := w.Next(ctx)
		if err != nil {
			break
		}
		p.compute(b, "")
	}
	w.Close()
	os.Exit(0)
}

// playSleepingBroker runs a broker with room for some of its models.
func playSleepingBroker(c *testbed.Child, socket string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cfg := broker.Config{Socket: socket, GPUMemory: map[int]int64{0: sleeperRoom},
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))}
	for i := range sleepers {
		m := sleeper(i).Config()
		fails := failedStarts
		if i == sleepers-1 {
			fails = brokenStarts
		}
		m.Workers = []supervise.Worker{{Command: []string{self}, Env: map[string]string{sleeperEnv: strconv.Itoa(fails)}, GPUs: []int{0},
			Memory: sleeperBytes}}
		if i%2 == 0 {
			m.Idle = sleeperIdle
		}
		cfg.Models = append(cfg.Models, m)
	}
	b, err := broker.New(cfg)
	if err == nil {
		err = c.Ready()
	}
	if err == nil {
		err = b.Serve(c.Context())
	}
	return err
}

// sleepModels kills workers of models that take turns in a GPU's memory. Each request ends
// with the right bytes or a named error, each model answers, and the budget holds.
func sleepModels(r *run) {
	b := r.start(testbed.Spec{Role: "sleeping broker", Job: r.socket(), Procs: 2})
	r.must(b.Expect("ready", nil, enoughTime))
	ctx, stop := context.WithCancel(r.ctx)
	defer stop()
	var loads sync.WaitGroup
	tallies := make([]tally, sleepers)
	for i := range sleepers {
		tallies[i].Named = map[string]int{}
		seed := r.seed()
		loads.Go(func() { r.guard(func() { r.askInBursts(ctx, sleeper(i).Name, seed, &tallies[i]) }) })
	}
	a := admin.New(r.socket())
	var s *stats.Broker
	for kills := 0; kills < r.events && r.ctx.Err() == nil; {
		time.Sleep(time.Duration(200+r.intn(800)) * time.Millisecond)
		var err error
		if s, err = a.Stats(r.ctx); err != nil {
			r.check(false, "statistics: %v", err)
			break
		}
		r.checkRoom(s)
		if p := &s.Processes; len(*p) > 0 {
			if pid := (*p)[r.intn(len(*p))].Pid; pid > 1 && syscall.Kill(pid, syscall.SIGKILL) == nil {
				kills++
				r.progress(kills)
			}
		}
	}
	stop()
	loads.Wait()
	all := tally{Named: map[string]int{}}
	for i := range tallies {
		t := &tallies[i]
		all.add(t)
		broken := i == sleepers-1 && t.Named[status.ErrNoWorker.Name()] > 0
		r.check(t.OK > 0 || broken, "%s got no answer: %v", sleeper(i).Name, t.Named)
		r.check(len(t.Wrong) == 0, "%s: %v", sleeper(i).Name, t.Wrong)
		r.check(len(t.Late) == 0, "%s: %v", sleeper(i).Name, t.Late)
	}
	var wakes, sleeps, failed uint64
	err := testbed.Eventually(enoughTime, func() (err error) {
		if s, err = a.Stats(r.ctx); err != nil {
			return err
		}
		for i := range s.Models {
			if err := testbed.Settled(&s.Models[i]); err != nil {
				return err
			}
		}
		return nil
	})
	r.check(err == nil, "the broker at the end: %v", err)
	for i := range s.Models {
		x := s.Models[i].Staffing
		wakes, sleeps, failed = wakes+x.Wakes, sleeps+x.Sleeps, failed+x.FailedWakes
	}
	r.check(sleeps > 0, "no model slept")
	fmt.Printf("   %d answers, named errors %v, the slowest after %v; %d wakes, %d sleeps, %d failed\n", all.OK, all.Named,
		all.Slowest.Round(time.Millisecond), wakes, sleeps, failed)
	r.check(b.Stop(enoughTime) == nil, "the broker: %s", b.Log())
}

// checkRoom checks that the models that may have processes fit into the budget.
func (r *run) checkRoom(s *stats.Broker) {
	held := int64(0)
	for i := range s.Models {
		for _, m := range s.Models[i].Staffing.Memory {
			if m.Held {
				held += m.Bytes
			}
		}
	}
	running := 0
	for i := range s.Processes {
		if s.Processes[i].Pid != 0 {
			running++
		}
	}
	r.check(held <= sleeperRoom && running*sleeperBytes <= sleeperRoom, "%d processes, %d MiB held of %d", running, held>>20, sleeperRoom>>20)
}

// askInBursts sends requests for some seconds, and none for some, until ctx ends.
func (r *run) askInBursts(ctx context.Context, model string, seed uint64, t *tally) {
	rng := rand.New(rand.NewPCG(seed, 3))
	c, err := client.Dial(ctx, model, client.WithSocket(r.socket()), client.WithWindow(8))
	r.must(err)
	defer c.Close()
	for ctx.Err() == nil {
		for end := time.Now().Add(time.Duration(rng.IntN(4000)) * time.Millisecond); time.Now().Before(end) && ctx.Err() == nil; {
			x := make([]int64, testbed.Width)
			for j := range x {
				x[j] = rng.Int64N(1 << 20)
			}
			x[0] = cmdAnswer
			within, cancel := context.WithTimeout(context.Background(), napPatience)
			start := time.Now()
			err := testbed.Ask(within, c, x, testbed.Width)
			cancel()
			t.count(err, time.Since(start), napPatience+r.stalls.Longest(start, time.Now()), status.OK)
			time.Sleep(time.Duration(rng.IntN(20)) * time.Millisecond)
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Duration(rng.IntN(4000)) * time.Millisecond):
		}
	}
}
