// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

// forkedChildren ends sessions of every kind in good order while a forked child
// keeps the connection and the parent lives on. The session must end at once, and
// the broker must kill neither parent nor child.
func forkedChildren(r *run) {
	const lease = time.Second
	job := r.brokerJob()
	job.Models[0].Lease = lease
	h := r.startHost(job, 1, testbed.Spec{})
	stop := h.keepWorkers(1) // on a busy machine any worker can outlive that lease
	defer stop()
	h.load(loadJob{Load: 6, Pause: 1500})
	kinds := r.kinds()
	type pair struct {
		who    string
		parent *testbed.Process
		child  int
	}
	var pairs []pair
	defer func() {
		for _, p := range pairs {
			_ = syscall.Kill(p.child, syscall.SIGKILL) // the parent lives, so the number is still the child's
			r.bed.End(p.parent)
		}
	}()
	const left = "good-order end to the end of the session, with a forked child"
	for i := range r.events {
		kind, who := kinds[i%len(kinds)], []string{"client", "worker"}[i/len(kinds)%2]
		var p *testbed.Process
		began := time.Now()
		if kind == "go" {
			p = r.start(testbed.Spec{Role: "forker", Job: forkerJob{r.socket(), who, r.seed()}, Procs: 2})
		} else {
			p = r.peer("forks", r.socket(), theModel.Name, who, strconv.Itoa(r.intn(1<<30)))
		}
		var ended struct {
			Child int
			At    int64
		}
		if err := p.Expect("ended", &ended, enoughTime); err != nil {
			if took := time.Since(began); took > lease && h.killed(p) {
				r.notJudged("a %s worker stood still past its lease before it could end in good order", kind)
			} else {
				r.fail("a %s %s: %v", kind, who, err)
			}
			r.bed.End(p)
			continue
		}
		pairs = append(pairs, pair{kind + " " + who, p, ended.Child})
		msg := map[string]string{"client": "window returned", "worker": "worker left"}[who]
		at, ok := h.log.wait(msg, p.Pid(), enoughTime)
		r.check(ok, "a %s %s ended in good order, its forked child keeps the connection, and the broker keeps the session", kind, who)
		if ok {
			r.span(left, time.Unix(0, ended.At), at)
		}
		r.progress(i + 1)
		if len(pairs) < 32 && i+1 < r.events {
			continue
		}
		time.Sleep(2 * lease) // the broker would have killed a worker whose session had lived on
		for _, p := range pairs {
			r.check(p.parent.Running(), "the process of a %s that ended in good order was killed", p.who)
			r.check(p.child != 0 && syscall.Kill(p.child, 0) == nil, "the child of a %s was killed", p.who)
			_ = syscall.Kill(p.child, syscall.SIGKILL)
			r.bed.End(p.parent)
		}
		pairs = nil
	}
	h.endLoads()
	h.settled()
}

type forkerJob struct {
	Socket, Who string
	Seed        uint64
}

func playForker(c *testbed.Child, job forkerJob) error {
	runtime.LockOSThread() // the child ends with this thread
	rng := rand.New(rand.NewPCG(job.Seed, 3))
	ctx := c.Context()
	child, err := 0, error(nil)
	if job.Who == "client" {
		conn, derr := client.Dial(ctx, theModel.Name, client.WithSocket(job.Socket))
		if derr != nil {
			return derr
		}
		for range rng.IntN(3) {
			err = errors.Join(err, ask(conn, make([]int64, testbed.Width)))
		}
		child = forkSleeper()
		for range rng.IntN(3) {
			err = errors.Join(err, ask(conn, make([]int64, testbed.Width)))
		}
		err = errors.Join(err, conn.Close())
	} else {
		w, aerr := worker.Attach(ctx, theModel.WorkerConfig(job.Socket))
		if aerr != nil {
			return aerr
		}
		p := &player{Child: c, rng: rng}
		before := rng.IntN(3)
		for i := range before + 1 + rng.IntN(3) {
			if i == before {
				child = forkSleeper()
			}
			next, cancel := context.WithTimeout(ctx, time.Second)
			b, err := w.Next(next)
			cancel()
			if err == nil {
				p.compute(b, "")
			}
		}
		w.Close()
	}
	if err != nil {
		return err
	}
	_ = c.Tell("ended", map[string]int64{"Child": int64(child), "At": time.Now().UnixNano()})
	<-ctx.Done()
	return nil
}

// forkSleeper forks a child that inherits every open descriptor and sleeps. The
// child runs no Go code.
func forkSleeper() int {
	parent := os.Getpid()
	pid, _, errno := unix.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if errno != 0 {
		return 0
	}
	if pid == 0 {
		_, _, _ = unix.RawSyscall(unix.SYS_PRCTL, unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0)
		if now, _, _ := unix.RawSyscall(unix.SYS_GETPPID, 0, 0, 0); int(now) != parent {
			_, _, _ = unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
		}
		for {
			_, _, _ = unix.RawSyscall6(unix.SYS_PPOLL, 0, 0, 0, 0, 0, 0)
		}
	}
	return int(pid)
}
