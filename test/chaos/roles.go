// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"context"
	"math/rand/v2"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

// Roles of the campaigns' processes.
func Roles() testbed.Roles {
	return testbed.Roles{
		"broker":         deaf(testbed.With(testbed.PlayBroker)),
		"worker":         deaf(testbed.With(playWorker)),
		"client":         deaf(testbed.With(playClient)),
		"load":           deaf(testbed.With(playLoad)),
		"hostile":        deaf(testbed.With(playHostile)),
		"hostile client": deaf(testbed.With(playHostileClient)),
		"gateway":        testbed.With(playGateway),
		"ping":           testbed.With(playPing),

		"sequence":  deaf(testbed.With(playSequence)),
		"sequences": deaf(testbed.With(playSequences)),
		"dropper":   deaf(testbed.With(playDropper)),

		"writer":  deaf(testbed.With(playWriter)),
		"reader":  deaf(testbed.With(playReader)),
		"readers": deaf(testbed.With(playReaders)),

		"sleeping broker": testbed.With(playSleepingBroker),
		"stepped broker":  testbed.With(playSteppedBroker),

		"asker": deaf(testbed.With(playAsker)),

		"nuisance": deaf(testbed.With(playNuisance)),
		"forker":   deaf(testbed.With(playForker)),
	}
}

// deaf makes a role ignore the signals of signalStorm.
func deaf(role func(*testbed.Child) error) func(*testbed.Child) error {
	return func(c *testbed.Child) error {
		signal.Notify(make(chan os.Signal, 1), unix.SIGUSR1, unix.SIGCHLD, unix.SIGPROF)
		return role(c)
	}
}

// The first number of a row is a command to the worker.
const (
	cmdAnswer = 0
	cmdPoison = 0xdead // the worker dies of it
	cmdRaise  = 0xbad  // the worker's function raises
)

// victimJob describes a worker or client that dies at the step of its label.
type victimJob struct {
	Socket string
	Model  testbed.Model // default theModel
	Label  string        // none: it lives
	Seed   uint64
	After  int           // requests or batches before the step
	Takes  time.Duration // a batch of a worker

	UID     int  // its user
	OwnPIDs bool // in another PID namespace
}

// victim starts a worker or client. The job's defaults are this run's broker and model.
func (r *run) victim(role string, job victimJob) *testbed.Process {
	if job.Socket == "" {
		job.Socket = r.socket()
	}
	if job.Model.Name == "" {
		job.Model = theModel
	}
	if job.Seed == 0 {
		job.Seed = r.seed()
	}
	return r.start(testbed.Spec{Role: role, Job: job, UID: job.UID, OwnPIDs: job.OwnPIDs, Procs: 2})
}

// player is a victim, seen from inside.
type player struct {
	*testbed.Child
	victimJob
	rng *rand.Rand
}

func newPlayer(c *testbed.Child, job victimJob) *player {
	return &player{c, job, rand.New(rand.NewPCG(job.Seed, 2))}
}

// die reports the time and ends this process by SIGKILL.
func (p *player) die() {
	_ = p.Tell("dying", time.Now().UnixNano())
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	_, _, _ = syscall.RawSyscall(syscall.SYS_EXIT_GROUP, 9, 0, 0) // the first process of a PID namespace cannot kill itself
	select {}
}

// dieWithin dies at a random instruction of the caller's next work.
func (p *player) dieWithin(most time.Duration) {
	d := p.rng.Int64N(int64(most))
	go func() {
		runtime.LockOSThread()
		for end := shm.Now() + d; shm.Now() < end; {
		}
		p.die()
	}()
}

// playWorker serves some batches, then dies at its label.
func playWorker(c *testbed.Child, job victimJob) error {
	p := newPlayer(c, job)
	ctx := c.Context()
	for ctx.Err() == nil {
		cfg := p.Model.WorkerConfig(p.Socket)
		w, err := worker.Attach(ctx, cfg)
		if err != nil {
			time.Sleep(5 * time.Millisecond)
			continue
		}
		_ = c.Tell("attached", nil)
		for p.Model.Lanes == 0 || p.goRounds(ctx, w) {
			b, err := w.Next(ctx)
			if err != nil {
				break
			}
			p.compute(b, p.labelOfNext())
		}
		w.Close()
	}
	return nil
}

// labelOfNext is the step of the next batch at which this worker dies; none at first.
func (p *player) labelOfNext() string {
	if p.After--; p.After < 0 {
		return p.Label
	}
	return ""
}

func (p *player) compute(b *worker.Batch, label string) {
	switch label {
	case "taken":
		p.die()
	case "hangs up":
		p.hangUpAndDie()
	case "random":
		p.dieWithin(200 * time.Microsecond)
	}
	time.Sleep(p.Takes)
	if p.raises(b, label) {
		return
	}
	for i := range b.Rows() {
		if p.Model.State {
			testbed.RunStep(b, i, func() {
				if label == "half-written" {
					p.die()
				}
			})
			continue
		}
		x := worker.Row[int64](b.Input(0), i)
		if x[0] == cmdPoison {
			p.die()
		}
		y := worker.Row[int64](b.Output(0), i)
		for j := range x {
			y[j] = testbed.Answer(x[j], j)
			if label == "half-written" && j == len(x)/2 {
				p.die()
			}
		}
	}
	p.answer(b, label)
}

func (p *player) answer(b *worker.Batch, label string) {
	switch label {
	case "before word":
		p.die()
	case "word to done":
		p.dieWithin(20 * time.Microsecond)
	}
	b.Complete()
	if label == "after done" {
		p.die()
	}
}

// playClient runs some requests, then dies at its label.
func playClient(c *testbed.Child, job victimJob) error {
	p := newPlayer(c, job)
	if p.Label == "dial" {
		p.dieWithin(400 * time.Microsecond)
	}
	ctx := c.Context()
	conn, err := client.Dial(ctx, p.Model.Name, client.WithSocket(p.Socket), client.WithWindow(1+p.rng.IntN(8)), client.WaitForModel())
	if err != nil {
		return err
	}
	for id := int64(0); ; id++ {
		if p.After--; p.After < 0 && p.Label == "random" {
			p.dieWithin(1500 * time.Microsecond)
		}
		rows := 1 + p.rng.IntN(min(conn.Model().Window, conn.Model().MaxBatchSize, 3))
		x := make([]int64, rows*testbed.Width)
		for j := range x {
			x[j] = id + int64(j)
			if j%testbed.Width == 0 {
				x[j] = cmdAnswer
			}
		}
		err := testbed.StepByStep(ctx, conn, rows, x, func(step string) {
			switch {
			case p.After >= 0:
			case step == p.Label:
				p.die()
			case step == testbed.StepCommit && p.Label == "wait":
				p.dieWithin(300 * time.Microsecond)
			}
		})
		if err != nil {
			return err
		}
	}
}

// playPing attaches to a socket and leaves.
func playPing(c *testbed.Child, socket string) error {
	ctx, cancel := context.WithTimeout(c.Context(), enoughTime)
	defer cancel()
	conn, err := client.Dial(ctx, theModel.Name, client.WithSocket(socket))
	if err != nil {
		return err
	}
	_ = c.Tell("attached", nil)
	return conn.Close()
}
