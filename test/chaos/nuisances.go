// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// refused is a user that is on no list.
const refused = stranger + 1

// nuisance is somebody who breaks no rule and costs what it can. It returns
// how much it did; a refusal with a name is as it should be.
type nuisance struct {
	name string
	uid  int
	play func(ctx context.Context, socket string, rng *rand.Rand) (int, error)
}

var nuisances = []nuisance{
	{"cancels that mean nothing", stranger, func(ctx context.Context, socket string, rng *rand.Rand) (int, error) {
		return floodCancels(ctx, socket, theModel.Name, 1+rng.IntN(theModel.Slots/2))
	}},
	{"commits that have expired", stranger, floodCommits},
	{"cancels in a huge ring", stranger, hugeRing},
	{"huge rings declared", stranger, declareHuge},
	{"attach storm", stranger, attachStorm},
	{"long settings", stranger, longSettings},
	{"statistics all the time", stranger, askAllTheTime},
	{"idle connections", stranger, idleConnections},
	{"connections that hang up", stranger, hangUp},
	{"a refused user", refused, hammer},
	{"a refused user that hangs up", refused, hangUp},
}

// annoy lets one nuisance after the other loose beside an innocent model,
// whose clients should not notice: they are compared with how they fare beside
// a process that takes the same CPU and leaves the broker alone.
func annoy(r *run) {
	job := r.withNeighbour()
	r.must(r.openTo(&job, broker.Grant{UIDs: []int{stranger}, May: broker.MayInfer | broker.MayServe | broker.MayAdminister}))
	h := r.startHost(job, 1, testbed.Spec{})
	h.keeps = brokerTakes
	h.neighbourhood()
	h.load(loadJob{Load: 2, Pause: 4000}) // and of the model that is annoyed
	for i := range r.events {
		n := nuisances[(i+r.intn(len(nuisances)))%len(nuisances)]
		if r.events >= len(nuisances) {
			n = nuisances[i%len(nuisances)]
		}
		r.annoyWith(h, n)
		r.progress(i + 1)
	}
	h.endLoads()
	h.settled()
}

// openTo lets other users in.
func (r *run) openTo(job *testbed.BrokerJob, grants ...broker.Grant) error {
	dir := r.bed.Path("open")
	r.must(errors.Join(os.Chmod(r.bed.Dir, 0o755), os.MkdirAll(dir, 0o755), os.Chmod(dir, 0o755)))
	job.OpenFolder, job.Grants = true, grants
	return nil
}

// nuisanceTime is how long each goes on.
const nuisanceTime = 2 * time.Second

// brokerTakes is how much more memory than before a nuisance may cost the
// broker.
const brokerTakes = 160 << 20

func (r *run) annoyWith(h *host, n nuisance) {
	long := r.events >= len(nuisances)
	d := nuisanceTime
	if !long {
		d /= 4
	}
	beside := func(name string, uid int) (w window, did int) {
		p := r.start(testbed.Spec{Role: "nuisance", Job: nuisanceJob{h.socket(), name, r.seed()}, UID: uid, Procs: 2})
		defer r.bed.End(p)
		_ = unix.Setpriority(unix.PRIO_PROCESS, p.Pid(), 19)
		r.must(p.Expect("ready", nil, enoughTime))
		w = h.windowOver(func() {
			time.Sleep(d)
			if name != "" { // the broker's own user is let in meanwhile
				err := p.Expect("done", nil, enoughTime) // something, however busy the machine is
				r.check(err == nil, "%s: %v", name, err)
				began := time.Now()
				err = r.ping(h.socket(), 0)
				r.check(err == nil, "%s: the broker's own user cannot attach: %v", name, err)
				r.span("attaching beside a nuisance", began, time.Now())
			}
		})
		if err := errors.Join(p.Stop(enoughTime), p.Expect("did", &did, 0)); err != nil {
			r.fail("%s: %v", name, err)
		}
		return w, did
	}
	quiet, _ := beside("", n.uid)
	before := r.usage(h.broker)
	began := time.Now()
	annoyed, did := beside(n.name, n.uid)
	ended := time.Now()
	r.check(h.broker.Running(), "%s: the broker died: %v", n.name, h.broker.State())
	after := r.usage(h.broker)
	fmt.Printf("   %s: %d; innocent p99 %v beside a busy process, %v beside it, max %v; the broker's peak %d → %d MiB\n", n.name, did,
		quiet.P99.Round(time.Microsecond), annoyed.P99.Round(time.Microsecond), annoyed.Max.Round(time.Microsecond), before.Peak>>20, after.Peak>>20)
	r.check(did > 0, "%s: it did nothing", n.name)
	r.check(after.Peak <= before.Peak+brokerTakes, "%s cost the broker %d MiB", n.name, (after.Peak-before.Peak)>>20)
	switch {
	case min(quiet.N, annoyed.N) < enough:
		r.notJudged("%s: %d and %d innocent requests are too few", n.name, quiet.N, annoyed.N)
	case !long && r.stalls.Longest(began, ended) > 0:
		r.notJudged("%s: the machine stood still in that half second", n.name)
	case !long: // of half a second the p99 is the slowest few, which one pause of the broker makes
		r.quick(annoyed.P50 <= 2*quiet.P50+50*time.Millisecond, "%s: the innocent model's p50 rose from %v to %v", n.name, quiet.P50, annoyed.P50)
	default:
		r.quick(annoyed.P99 <= 2*quiet.P99+2*time.Millisecond, "%s: the innocent model's p99 rose from %v to %v", n.name, quiet.P99, annoyed.P99)
	}
}

// nuisanceJob is that of a process that is one; without a name it only takes
// CPU.
type nuisanceJob struct {
	Socket, Name string
	Seed         uint64
}

func playNuisance(c *testbed.Child, job nuisanceJob) error {
	ctx := c.Context()
	rng := rand.New(rand.NewPCG(job.Seed, 9))
	_ = c.Ready()
	did := 0
	for ctx.Err() == nil {
		if job.Name == "" {
			for end := time.Now().Add(10 * time.Millisecond); time.Now().Before(end); {
			}
			continue
		}
		for _, n := range nuisances {
			if n.name != job.Name {
				continue
			}
			k, err := n.play(ctx, job.Socket, rng)
			if did += k; did > 0 && did == k {
				_ = c.Tell("done", nil)
			}
			if err != nil && ctx.Err() == nil && !named(err) {
				return fmt.Errorf("%s: refused without a name: %w", n.name, err)
			}
		}
	}
	return c.Tell("did", did)
}

// turn is how long a nuisance goes on before it looks whether it should end.
const turn = 50 * time.Millisecond

func floodCancels(ctx context.Context, socket, model string, window int) (n int, err error) {
	s, err := attach.Open(ctx, socket, shm.Memfd{}, &control.Request{Op: control.OpClient, Model: model, Window: window})
	if err != nil {
		return 0, err
	}
	defer func() { s.HangUp(); s.Close() }()
	ring := shm.Producer[shm.Commit]{Ring: shm.CommitRing(s.Words, s.Info.Window)}
	for end := time.Now().Add(turn); time.Now().Before(end); {
		for range 64 {
			wake, full := ring.Push(&shm.Commit{Kind: shm.KindCancel, Slot: s.Info.FirstSlot, Gen: s.Info.FirstGen})
			if full {
				break // the broker is behind
			}
			if n++; wake {
				s.Doorbell.Ring()
			}
		}
	}
	return n, nil
}

// floodCommits sends requests whose deadline has passed: each is looked at,
// and ended.
func floodCommits(ctx context.Context, socket string, rng *rand.Rand) (n int, err error) {
	window := 1 + rng.IntN(64)
	s, err := attach.Open(ctx, socket, shm.Memfd{}, &control.Request{Op: control.OpClient, Model: theModel.Name, Window: window})
	if err != nil {
		return 0, err
	}
	defer func() { s.HangUp(); s.Close() }()
	ring := shm.Producer[shm.Commit]{Ring: shm.CommitRing(s.Words, s.Info.Window)}
	gen := make([]uint32, s.Info.Window)
	for end := time.Now().Add(turn); time.Now().Before(end); {
		for i := range gen {
			slot := s.Info.FirstSlot + uint32(i)
			if w := s.Board.Word(slot); w.Held() || w.Generation() != s.Info.FirstGen+gen[i] {
				continue // still under way
			}
			gen[i]++
			now := shm.Now()
			wake, full := ring.Push(&shm.Commit{Kind: shm.KindCommit, Level: -1, Rows: 1, Slot: slot, Gen: s.Info.FirstGen + gen[i], Deadline: now - 1, Committed: now})
			if full {
				gen[i]--
				break
			}
			if n++; wake {
				s.Doorbell.Ring()
			}
		}
	}
	return n, nil
}

// wide is a worker's request that declares a model of its own.
func wide(name string, slots int) *control.Request {
	return &control.Request{Op: control.OpWorker, Model: name, Policy: map[string]string{"slots": fmt.Sprint(slots)},
		Worker: &control.WorkerInfo{Inputs: []string{"x:u8[1]"}, Outputs: []string{"y:u8[1]"}, Depth: 1}}
}

const hugeModel = "huge"

// hugeRing declares a model with as many slots as it gets, and then cancels in
// a window of most of them.
func hugeRing(ctx context.Context, socket string, rng *rand.Rand) (int, error) {
	slots := 1 << (16 + rng.IntN(5))
	s, err := attach.Open(ctx, socket, shm.Memfd{}, wide(hugeModel, slots))
	if err != nil {
		return 1, err
	}
	defer func() { s.HangUp(); s.Close() }()
	n, err := floodCancels(ctx, socket, hugeModel, s.Info.Slots/2)
	return n + 1, err
}

// declareHuge declares one huge model after the other, a new one each time.
func declareHuge(ctx context.Context, socket string, rng *rand.Rand) (int, error) {
	return 1, visit(ctx, socket, wide(fmt.Sprintf("%s-%d", hugeModel, rng.IntN(1<<30)), 1<<(17+rng.IntN(4))))
}

func attachStorm(ctx context.Context, socket string, rng *rand.Rand) (int, error) {
	return 1, visit(ctx, socket, &control.Request{Op: control.OpClient, Model: theModel.Name, Window: 1 + rng.IntN(theModel.Slots/2)})
}

// visit attaches and leaves.
func visit(ctx context.Context, socket string, req *control.Request) error {
	s, err := attach.Open(ctx, socket, shm.Memfd{}, req)
	if err == nil {
		s.HangUp()
		s.Close()
	}
	return err
}

// longSettings asks for settings that take long to read.
func longSettings(ctx context.Context, socket string, rng *rand.Rand) (int, error) {
	size := control.MaxRequest - 4096 - rng.IntN(4096)
	key := []string{"preferred_batch_sizes", "buckets.x.0", "max_queue", strings.Repeat("k", 1000)}[rng.IntN(4)]
	value := []string{strings.Repeat("1,", size/2), strings.Repeat("9", size), strings.Repeat(" ", size), strings.Repeat("1ms", size/3)}[rng.IntN(4)]
	_, err := attach.CallOnce(ctx, socket, &control.Request{Op: control.OpSet, Model: theModel.Name, Policy: map[string]string{key: value}})
	if err == nil {
		return 1, fmt.Errorf("nonsense of %d bytes was accepted for %.20s", len(value), key)
	}
	return 1, err
}

func askAllTheTime(ctx context.Context, socket string, rng *rand.Rand) (int, error) {
	_, err := attach.CallOnce(ctx, socket, &control.Request{Op: []control.Op{control.OpStats, control.OpModels, control.OpPing}[rng.IntN(3)]})
	return 1, err
}

// idleConnections has as many as it gets, and keeps them for a while.
func idleConnections(ctx context.Context, socket string, rng *rand.Rand) (n int, err error) {
	var all []net.Conn
	defer func() {
		for _, c := range all {
			_ = c.Close()
		}
	}()
	_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 8192, Max: 8192})
	for len(all) < 6000 && ctx.Err() == nil {
		c, err := attach.Dial(ctx, socket)
		if err != nil {
			break // this process has no descriptors left
		}
		all = append(all, c)
	}
	select {
	case <-ctx.Done():
	case <-time.After(time.Duration(200+rng.IntN(400)) * time.Millisecond):
	}
	return len(all), nil
}

// hangUp connects and hangs up, all the time.
func hangUp(ctx context.Context, socket string, _ *rand.Rand) (n int, err error) {
	for end := time.Now().Add(turn); time.Now().Before(end); n++ {
		c, err := attach.Dial(ctx, socket)
		if err != nil {
			return n, err
		}
		_ = c.Close()
	}
	return n, nil
}

// hammer connects as somebody who may not.
func hammer(ctx context.Context, socket string, _ *rand.Rand) (int, error) {
	_, err := attach.CallOnce(ctx, socket, &control.Request{Op: control.OpPing})
	if err == nil {
		return 1, errors.New("a user who is on no list was let in")
	}
	return 1, err
}

// playTry tells, for each thing that a user may want, how it ended.
func playTry(c *testbed.Child, socket string) error {
	ctx, cancel := context.WithTimeout(c.Context(), enoughTime)
	defer cancel()
	sig := theModel.Signature()
	serve := func(model string) *control.Request {
		return &control.Request{Op: control.OpWorker, Model: model,
			Worker: &control.WorkerInfo{Inputs: tensor.SpecTexts(sig.Inputs), Outputs: tensor.SpecTexts(sig.Outputs), Depth: 1}}
	}
	attached := func(req *control.Request) error { return visit(ctx, socket, req) }
	call := func(req *control.Request) error { _, err := attach.CallOnce(ctx, socket, req); return err }
	got := map[string]string{}
	for name, err := range map[string]error{
		"ping":     call(&control.Request{Op: control.OpPing}),
		"infer":    attached(&control.Request{Op: control.OpClient, Model: theModel.Name, Window: 1}),
		"serve":    attached(serve(theModel.Name)),
		"declare":  attached(serve("of a user")),
		"set":      call(&control.Request{Op: control.OpSet, Model: theModel.Name, Policy: map[string]string{"wait_time": "1ms"}}),
		"no lease": call(&control.Request{Op: control.OpSet, Model: theModel.Name, Policy: map[string]string{"lease": "1ns"}}),
	} {
		var s status.Code
		switch {
		case err == nil:
			got[name] = "ok"
		case errors.As(err, &s):
			got[name] = s.Name()
		default:
			got[name] = err.Error()
		}
	}
	return c.Tell("tried", got)
}
