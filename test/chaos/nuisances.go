// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// nuisance breaks no rule and costs the broker as much as possible. play returns
// how much it did; a named refusal is no error.
type nuisance struct {
	name string
	uid  int
	play func(ctx context.Context, socket string, rng *rand.Rand) (int, error)
}

var nuisances = []nuisance{
	{"cancels of no request", stranger, func(ctx context.Context, socket string, rng *rand.Rand) (int, error) {
		return floodCancels(ctx, socket, theModel.Name, 1+rng.IntN(theModel.Slots/2))
	}},
	{"commits that have expired", stranger, floodCommits},
	{"cancels in a huge ring", stranger, hugeRing},
	{"huge rings declared", stranger, declareHuge},
	{"attach storm", stranger, attachStorm},
	{"long settings", stranger, longSettings},
	{"statistics without a pause", stranger, askForStats},
	{"idle connections", stranger, func(ctx context.Context, socket string, rng *rand.Rand) (int, error) {
		return holdConnections(ctx, socket, rng, 6000, func(*net.UnixConn, *rand.Rand) {})
	}},
	{"frames that never end", stranger, func(ctx context.Context, socket string, rng *rand.Rand) (int, error) {
		return holdConnections(ctx, socket, rng, 800, sendings[rng.IntN(len(sendings))])
	}},
	{"connections that hang up", stranger, hangUp},
	{"a refused user", refused, hammer},
	{"a refused user that hangs up", refused, hangUp},
}

// annoy runs one nuisance after the other beside a model whose clients should not
// notice.
func annoy(r *run) {
	job := r.withNeighbour()
	r.openTo(&job, broker.Grant{UIDs: []int{stranger}, May: broker.MayInfer | broker.MayServe | broker.MayAdminister})
	control := r.startControl(job, 1, loadJob{Load: 4, Pause: 4000})
	h := r.startHost(job, 1, testbed.Spec{})
	h.keeps = brokerTakes
	h.neighbourhood()
	h.load(loadJob{Load: 2, Pause: 4000}) // of the model that the nuisance uses
	for i := range r.events {
		n := nuisances[(i+r.intn(len(nuisances)))%len(nuisances)]
		if r.events >= len(nuisances) {
			n = nuisances[i%len(nuisances)]
		}
		r.annoyWith(h, control, n)
		r.progress(i + 1)
	}
	h.endLoads()
	h.settled()
	control.endLoads()
}

// nuisanceTime is how long each nuisance lasts.
const nuisanceTime = 2 * time.Second

// brokerTakes is how much memory a nuisance may cost the broker.
const brokerTakes = 160 << 20

func (r *run) annoyWith(h, control *host, n nuisance) {
	long := r.events >= len(nuisances)
	d := nuisanceTime
	if !long {
		d /= 4
	}
	before := r.usage(h.broker)
	p := r.start(testbed.Spec{Role: "nuisance", Job: nuisanceJob{h.socket(), n.name, r.seed()}, UID: n.uid, Procs: 2})
	defer r.bed.End(p)
	_ = unix.Setpriority(unix.PRIO_PROCESS, p.Pid(), 19)
	r.must(p.Expect("ready", nil, enoughTime))
	c := h.compareWith(control, func() {
		time.Sleep(d)
		err := p.Expect("done", nil, enoughTime) // on a busy machine the first success takes a while
		r.check(err == nil, "%s: %v", n.name, err)
		began := time.Now()
		err = r.ping(h.socket(), 0)
		r.check(err == nil, "%s: the broker's own user cannot attach: %v", n.name, err)
		r.span("attaching beside a nuisance", began, time.Now())
	})
	did := 0
	if err := errors.Join(p.Stop(enoughTime), p.Expect("did", &did, 0)); err != nil {
		r.fail("%s: %v", n.name, err)
	}
	r.check(h.broker.Running(), "%s: the broker died: %v", n.name, h.broker.State())
	after := r.usage(h.broker)
	fmt.Printf("   %s: %d; innocent p99 %v, max %v, at a broker without %v; the broker's peak %d → %d MiB\n", n.name, did,
		c.attacked.P99.Round(time.Microsecond), c.attacked.Max.Round(time.Microsecond), c.control.P99.Round(time.Microsecond),
		before.Peak>>20, after.Peak>>20)
	r.check(did > 0, "%s: it did nothing", n.name)
	r.check(after.Peak <= before.Peak+brokerTakes, "%s cost the broker %d MiB", n.name, (after.Peak-before.Peak)>>20)
	if long {
		c.notSlower(r, n.name+": the innocent model's p99", c.attacked.P99, c.control.P99, 2*time.Millisecond)
	} else { // of half a second the p99 is the slowest few, which one pause of the broker makes
		c.notSlower(r, n.name+": the innocent model's p50", c.attacked.P50, c.control.P50, 50*time.Millisecond)
	}
}

type nuisanceJob struct {
	Socket, Name string
	Seed         uint64
}

// playNuisance says "done" after the first success, and "did" with the sum at the end.
func playNuisance(c *testbed.Child, job nuisanceJob) error {
	ctx := c.Context()
	rng := rand.New(rand.NewPCG(job.Seed, 9))
	i := slices.IndexFunc(nuisances, func(n nuisance) bool { return n.name == job.Name })
	_ = c.Ready()
	did := 0
	for ctx.Err() == nil {
		k, err := nuisances[i].play(ctx, job.Socket, rng)
		if did += k; did > 0 && did == k {
			_ = c.Tell("done", nil)
		}
		var code status.Code
		if err != nil && ctx.Err() == nil && !errors.As(err, &code) {
			return fmt.Errorf("%s: refused without a name: %w", job.Name, err)
		}
	}
	return c.Tell("did", did)
}

// turn is how long a nuisance goes on before it checks for its end.
const turn = 50 * time.Millisecond

func floodCancels(ctx context.Context, socket, model string, window int) (n int, err error) {
	s, err := attach.Open(ctx, socket, &control.Request{Op: control.OpClient, Model: model, Window: window})
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

// floodCommits sends requests whose deadline has passed.
func floodCommits(ctx context.Context, socket string, rng *rand.Rand) (n int, err error) {
	window := 1 + rng.IntN(64)
	s, err := attach.Open(ctx, socket, &control.Request{Op: control.OpClient, Model: theModel.Name, Window: window})
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
			wake, full := ring.Push(&shm.Commit{Kind: shm.KindCommit, Level: -1, Rows: 1, Slot: slot, Gen: s.Info.FirstGen + gen[i],
				Deadline: now - 1, Committed: now})
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

// wide is a worker's request that declares a model.
func wide(name string, slots int) *control.Request {
	return &control.Request{Op: control.OpWorker, Model: name, Policy: map[string]string{"slots": fmt.Sprint(slots)},
		Worker: &control.WorkerInfo{Inputs: []string{"x:u8[1]"}, Outputs: []string{"y:u8[1]"}, Depth: 1}}
}

const hugeModel = "huge"

// hugeRing declares a model with many slots and floods a window of half of them with
// cancels.
func hugeRing(ctx context.Context, socket string, rng *rand.Rand) (int, error) {
	slots := 1 << (16 + rng.IntN(5))
	s, err := attach.Open(ctx, socket, wide(hugeModel, slots))
	if err != nil {
		return 1, err
	}
	defer func() { s.HangUp(); s.Close() }()
	n, err := floodCancels(ctx, socket, hugeModel, s.Info.Slots/2)
	return n + 1, err
}

// declareHuge declares one new huge model after the other.
func declareHuge(ctx context.Context, socket string, rng *rand.Rand) (int, error) {
	return 1, visit(ctx, socket, wide(fmt.Sprintf("%s-%d", hugeModel, rng.IntN(1<<30)), 1<<(17+rng.IntN(4))))
}

func attachStorm(ctx context.Context, socket string, rng *rand.Rand) (int, error) {
	return 1, visit(ctx, socket, &control.Request{Op: control.OpClient, Model: theModel.Name, Window: 1 + rng.IntN(theModel.Slots/2)})
}

// visit attaches and leaves.
func visit(ctx context.Context, socket string, req *control.Request) error {
	s, err := attach.Open(ctx, socket, req)
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
	unit := []string{"1,", "9", " ", "1ms"}[rng.IntN(4)]
	value := strings.Repeat(unit, size/len(unit))
	_, err := attach.CallOnce(ctx, socket, &control.Request{Op: control.OpSet, Model: theModel.Name, Policy: map[string]string{key: value}})
	if err == nil {
		return 1, fmt.Errorf("nonsense of %d bytes was accepted for %.20s", len(value), key)
	}
	return 1, err
}

func askForStats(ctx context.Context, socket string, rng *rand.Rand) (int, error) {
	ops := []control.Op{control.OpStats, control.OpModels, control.OpPing}
	_, err := attach.CallOnce(ctx, socket, &control.Request{Op: ops[rng.IntN(len(ops))]})
	return 1, err
}

// holdConnections opens connections up to most, sends something on each, and keeps
// them for a while.
func holdConnections(ctx context.Context, socket string, rng *rand.Rand, most int, send func(*net.UnixConn, *rand.Rand)) (int, error) {
	var all []*net.UnixConn
	defer func() {
		for _, c := range all {
			_ = c.Close()
		}
	}()
	_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 8192, Max: 8192})
	for len(all) < most && ctx.Err() == nil {
		c, err := attach.Dial(ctx, socket)
		if err != nil {
			break // this process has no descriptors left
		}
		all = append(all, c)
		_ = c.SetWriteDeadline(time.Now().Add(30 * time.Millisecond)) // the broker may have refused it
		send(c, rng)
		_ = c.SetWriteDeadline(time.Time{})
	}
	select {
	case <-ctx.Done():
	case <-time.After(time.Duration(200+rng.IntN(400)) * time.Millisecond):
	}
	return len(all), nil
}

// sendings begin a message and do not end it.
var sendings = []func(c *net.UnixConn, rng *rand.Rand){
	func(c *net.UnixConn, _ *rand.Rand) { sendShort(c, control.MaxRequest, 1) },
	func(c *net.UnixConn, _ *rand.Rand) { sendShort(c, control.MaxFrame, 1) },
	func(c *net.UnixConn, rng *rand.Rand) {
		n := 1 + rng.IntN(control.MaxRequest)
		sendShort(c, n, (n+1)/2)
	},
	func(c *net.UnixConn, rng *rand.Rand) { // a length and nothing more
		_, _ = c.Write(binary.LittleEndian.AppendUint32(nil, rng.Uint32()))
	},
	func(c *net.UnixConn, _ *rand.Rand) { _, _ = c.Write([]byte{1, 0}) }, // half a length
	func(c *net.UnixConn, _ *rand.Rand) { // with descriptors
		head := binary.LittleEndian.AppendUint32(nil, control.MaxRequest)
		_, _, _ = c.WriteMsgUnix(head, unix.UnixRights(0, 1, 2, 0, 1, 2, 0, 1), nil)
	},
	func(c *net.UnixConn, _ *rand.Rand) { // byte by byte
		_, _ = c.Write(binary.LittleEndian.AppendUint32(nil, control.MaxRequest))
		go func() {
			for {
				if _, err := c.Write([]byte{0x90}); err != nil {
					return
				}
				time.Sleep(20 * time.Millisecond)
			}
		}()
	},
	func(c *net.UnixConn, _ *rand.Rand) { // replies that the sender does not read
		_ = c.SetReadBuffer(1)
		for range 8 {
			req := &control.Request{Version: control.Version, Op: control.OpStats}
			if control.Send(c, time.Now().Add(20*time.Millisecond), req) != nil {
				return
			}
		}
	},
}

func sendShort(c *net.UnixConn, size, missing int) {
	frame := binary.LittleEndian.AppendUint32(nil, uint32(size))
	_, _ = c.Write(append(frame, bytes.Repeat([]byte{0x90}, size-missing)...))
}

// hangUp connects and hangs up, for a turn.
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

// hammer connects as a user who may not.
func hammer(ctx context.Context, socket string, _ *rand.Rand) (int, error) {
	_, err := attach.CallOnce(ctx, socket, &control.Request{Op: control.OpPing})
	if err == nil {
		return 1, errors.New("a user who is on no list was let in")
	}
	return 1, err
}
