// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

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
	sleepers     = 20
	sleeperBytes = 1 << 30
	sleeperRooms = 5
	sleeperIdle  = 2 * time.Second
	sleeperStart = 300 * time.Millisecond
	napPatience  = 2 * time.Minute

	// The starts of the last two models: most fail, or some hang. A hung start lasts for
	// minutes, so requests of that model wait less.
	brokenSleeper, hangingSleeper = sleepers - 1, sleepers - 2
	hungPatience                  = 15 * time.Second
)

// sleeperJob is how the workers of a sleeper start. Rooms is a folder of files; a process
// that holds the lock of one has the memory of a worker.
type sleeperJob struct {
	Name        string
	Rooms       string
	Fails, Hang int           // percent
	Takes       time.Duration // a batch
}

func sleeper(i int) testbed.Model {
	m := theModel
	m.Name, m.Slots = fmt.Sprint("sleeper", i), 64
	return m
}

// sleeperEnv makes this program a worker of a sleeper, as the broker's supervisor starts it.
const sleeperEnv = "RINGBATCH_CHAOS_SLEEPER"

// PlaySleeper runs a worker that the supervisor started, and exits; in any other process it
// does nothing.
func PlaySleeper() {
	var job sleeperJob
	if json.Unmarshal([]byte(os.Getenv(sleeperEnv)), &job) != nil {
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if job.Rooms != "" {
		stolen := isStolen(job.Rooms)
		room := takeRoom(job.Rooms)
		if room == nil {
			if !stolen && !isStolen(job.Rooms) {
				_ = os.WriteFile(filepath.Join(job.Rooms, "exceeded"), []byte(job.Name), 0o600)
			}
			os.Exit(5) // as a process that finds no memory
		}
		defer room.Close()
	}
	time.Sleep(sleeperStart)
	if rand.N(100) < job.Fails {
		os.Exit(3)
	}
	if rand.N(100) < job.Hang {
		<-ctx.Done()
	}
	m := theModel
	m.Name, m.Slots = job.Name, 64
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
		time.Sleep(job.Takes)
		p.compute(b, "")
	}
	w.Close()
	os.Exit(0)
}

// takeRoom locks one of the rooms; nil if there is none.
func takeRoom(folder string) *os.File {
	for i := range sleeperRooms {
		f, err := os.OpenFile(filepath.Join(folder, strconv.Itoa(i)), os.O_CREATE|os.O_RDWR, 0o600)
		if err == nil && unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			return f
		}
		_ = f.Close()
	}
	return nil
}

func isStolen(folder string) bool {
	_, err := os.Stat(filepath.Join(folder, "stolen"))
	return err == nil
}

// stealRoom takes a room now and then, as another program takes memory of the GPU.
func stealRoom(ctx context.Context, folder string) {
	for ctx.Err() == nil {
		_ = os.WriteFile(filepath.Join(folder, "stolen"), nil, 0o600)
		room := takeRoom(folder)
		wait(ctx, 3*time.Second)
		_ = room.Close()
		_ = os.Remove(filepath.Join(folder, "stolen"))
		wait(ctx, 12*time.Second)
	}
}

func wait(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

type sleepingJob struct {
	Socket, Rooms string
	Faults        bool
}

// worker declares the process that plays the job.
func (j sleeperJob) worker() supervise.Worker {
	self, _ := os.Executable() // without it the broker refuses the worker
	env, _ := json.Marshal(j)
	return supervise.Worker{Command: []string{self}, Env: map[string]string{sleeperEnv: string(env)}}
}

// playSleepingBroker runs a broker with room for some of its models.
func playSleepingBroker(c *testbed.Child, job sleepingJob) error {
	cfg := broker.Config{Socket: job.Socket, GPUMemory: map[int]int64{0: sleeperRooms * sleeperBytes}}
	for i := range sleepers {
		m := sleeper(i).Config()
		start := sleeperJob{Name: m.Name, Rooms: job.Rooms}
		switch {
		case !job.Faults:
		case i == brokenSleeper:
			start.Fails = 80
		case i == hangingSleeper:
			start.Hang = 20
		default:
			start.Fails = 10
		}
		w := start.worker()
		w.GPUs, w.Memory = []int{0}, sleeperBytes
		m.Workers = []supervise.Worker{w}
		if i%2 == 0 {
			m.Idle = sleeperIdle
		}
		cfg.Models = append(cfg.Models, m)
	}
	return serveBroker(c, cfg)
}

func serveBroker(c *testbed.Child, cfg broker.Config) error {
	cfg.Logger = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))
	b, err := broker.New(cfg)
	if err == nil {
		err = c.Ready()
	}
	if err == nil {
		err = b.Serve(c.Context())
	}
	return err
}

// turnModels has models take turns under a random load. No request fails; events are seconds.
func turnModels(r *run) { sleepModels(r, false) }

// disturbModels kills workers beside that; starts fail or hang, and another program takes
// memory. Each request ends with the right bytes or a named error.
func disturbModels(r *run) { sleepModels(r, true) }

func sleepModels(r *run, faults bool) {
	rooms := r.bed.Path("rooms")
	r.must(os.Mkdir(rooms, 0o700))
	b := r.start(testbed.Spec{Role: "sleeping broker", Job: sleepingJob{r.socket(), rooms, faults}, Procs: 2})
	r.must(b.Expect("ready", nil, enoughTime))
	ctx, stop := context.WithCancel(r.ctx)
	defer stop()
	var loads sync.WaitGroup
	loaded := make([]burstLoad, sleepers)
	for i := range sleepers {
		l := &loaded[i]
		l.model, l.seed, l.patience, l.Named = sleeper(i).Name, r.seed(), napPatience, map[string]int{}
		switch {
		case faults && i == brokenSleeper:
			l.mayEnd = status.ErrNoWorker
		case faults && i == hangingSleeper:
			l.mayEnd, l.patience = status.ErrExpired, hungPatience
		}
		loads.Go(func() { r.guard(func() { r.askInBursts(ctx, l) }) })
	}
	if faults {
		loads.Go(func() { stealRoom(ctx, rooms) })
	}
	a := admin.New(r.socket())
	for done := 0; done < r.events && r.ctx.Err() == nil; {
		if !faults {
			done++
			wait(r.ctx, time.Second)
		} else {
			wait(r.ctx, time.Duration(200+r.intn(800))*time.Millisecond)
		}
		s, err := a.Stats(r.ctx)
		if err != nil {
			r.check(false, "statistics: %v", err)
			break
		}
		r.checkRoom(s)
		if p := &s.Processes; faults && len(*p) > 0 {
			if pid := (*p)[r.intn(len(*p))].Pid; pid > 1 && syscall.Kill(pid, syscall.SIGKILL) == nil {
				done++
			}
		}
		r.progress(done)
	}
	stop()
	loads.Wait()
	all := tally{Named: map[string]int{}}
	for i := range loaded {
		l := &loaded[i]
		all.add(&l.tally)
		r.check(l.served(), "%s got no answer: %v", l.model, l.Named)
		r.check(len(l.Wrong) == 0, "%s: %v", l.model, l.Wrong)
		r.check(len(l.Late) == 0, "%s: %v", l.model, l.Late)
	}
	r.check(faults || len(all.Named) == 0, "requests failed: %v", all.Named)
	exceeded, err := os.ReadFile(filepath.Join(rooms, "exceeded"))
	r.check(err != nil, "%s was started without room", exceeded)
	var s *stats.Broker
	err = testbed.Eventually(enoughTime, func() (err error) {
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
	var wakes, sleeps, failed uint64
	var took []time.Duration // beyond the start itself
	for i := range s.Models {
		x := s.Models[i].Staffing
		wakes, sleeps, failed = wakes+x.Wakes, sleeps+x.Sleeps, failed+x.FailedWakes
		took = append(took, time.Duration(x.WakeMS*float64(time.Millisecond))-sleeperStart)
	}
	slices.Sort(took)
	r.check(sleeps > 0, "no model slept")
	fmt.Printf("   %d answers, named errors %v, the slowest after %v; %d wakes, %d sleeps, %d failed; the models' last wakes took %v to %v "+
		"longer than their start\n", all.OK, all.Named, all.Slowest.Round(time.Millisecond), wakes, sleeps, failed,
		took[0].Round(time.Millisecond), took[len(took)-1].Round(time.Millisecond))
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
	r.check(held <= sleeperRooms*sleeperBytes && running <= sleeperRooms, "%d processes, %d MiB held of %d", running, held>>20, sleeperRooms*sleeperBytes>>20)
}

// burstLoad is the requests to a model, and their ends.
type burstLoad struct {
	model    string
	seed     uint64
	patience time.Duration
	mayEnd   status.Code // its requests may all end so; OK: one must be answered
	tally
}

func (l *burstLoad) served() bool {
	return l.OK > 0 || l.mayEnd != status.OK && l.Named[l.mayEnd.Name()] > 0
}

// askInBursts sends requests for some seconds, and none for some, until ctx ends. After that
// there are no more faults, so a model that could not start so far must answer in time.
func (r *run) askInBursts(ctx context.Context, l *burstLoad) {
	rng := rand.New(rand.NewPCG(l.seed, 3))
	c, err := client.Dial(ctx, l.model, client.WithSocket(r.socket()), client.WithWindow(8))
	r.must(err)
	defer c.Close()
	for ctx.Err() == nil {
		for end := time.Now().Add(time.Duration(rng.IntN(4000)) * time.Millisecond); time.Now().Before(end) && ctx.Err() == nil; {
			r.askOnce(c, l, rng)
		}
		wait(ctx, time.Duration(rng.IntN(4000))*time.Millisecond)
	}
	for end := time.Now().Add(napPatience); !l.served() && r.ctx.Err() == nil && time.Now().Before(end); {
		r.askOnce(c, l, rng)
	}
}

func (r *run) askOnce(c *client.Client, l *burstLoad, rng *rand.Rand) {
	x := make([]int64, testbed.Width)
	for j := range x {
		x[j] = rng.Int64N(1 << 20)
	}
	x[0] = cmdAnswer
	start := time.Now()
	err := askWithin(c, x, l.patience)
	took := time.Since(start)
	time.Sleep(time.Duration(rng.IntN(20)) * time.Millisecond)
	l.count(err, took, l.patience+r.stalls.Longest(start, time.Now()), status.OK)
}
