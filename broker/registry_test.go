// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/broker/engine"
	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

func openFDs(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	must.Do(t, err)
	return len(list)
}

// everybody has peers of all kinds come and go at a broker with several loops:
// workers that declare the same few models, clients, admins. It ends when ctx
// does, or the broker.
type everybody struct {
	s  *supervised
	wg sync.WaitGroup

	mu   sync.Mutex
	seen map[string]int // how attachments and calls ended
}

func (e *everybody) note(what string, err error) {
	var code status.Code
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return // the test is over
	case errors.As(err, &code):
		what += " " + code.Name()
	case err != nil:
		what += " " + err.Error()
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.seen[what]++
}

func (e *everybody) run(ctx context.Context, n int, act func(ctx context.Context, rng *rand.Rand)) {
	for i := range n {
		e.wg.Add(1)
		go func() {
			defer e.wg.Done()
			for rng := rand.New(rand.NewPCG(uint64(i), uint64(n))); ctx.Err() == nil; {
				act(ctx, rng)
			}
		}()
	}
}

func (e *everybody) attach(ctx context.Context, rng *rand.Rand, what string, req *control.Request) {
	a, err := attach.Open(ctx, e.s.b.Socket(), req)
	e.note(what, err)
	if err == nil {
		time.Sleep(time.Duration(rng.IntN(3)) * time.Millisecond)
		a.Close()
	}
}

// start lets them loose on models d0 … d2, which exist only while somebody is
// there, and m, which is declared.
func (e *everybody) start(ctx context.Context) {
	name := func(rng *rand.Rand) string {
		return []string{"d0", "d1", "d2", "m"}[rng.IntN(4)]
	}
	e.run(ctx, 4, func(ctx context.Context, rng *rand.Rand) {
		e.attach(ctx, rng, "worker", &control.Request{Op: control.OpWorker, Model: name(rng),
			Worker: &control.WorkerInfo{Inputs: []string{"x:f32[4]"}, Outputs: []string{"y:f32[4]"}, Depth: 1 + rng.IntN(3)}})
	})
	e.run(ctx, 4, func(ctx context.Context, rng *rand.Rand) {
		e.attach(ctx, rng, "client", &control.Request{Op: control.OpClient, Model: name(rng), Window: 1 + rng.IntN(8)})
	})
	e.run(ctx, 1, func(ctx context.Context, rng *rand.Rand) { // refused each time, and none of it may stay
		e.attach(ctx, rng, "other", &control.Request{Op: control.OpWorker, Model: name(rng),
			Worker: &control.WorkerInfo{Inputs: []string{"x:f32[5]"}, Outputs: []string{"y:f32[4]"}, Depth: -1}})
	})
	e.run(ctx, 1, func(ctx context.Context, rng *rand.Rand) {
		set := control.Request{Op: control.OpSet, Model: name(rng), Policy: map[string]string{"wait_time": "1ms"}}
		_, err := attach.CallOnce(ctx, e.s.b.Socket(), &set)
		e.note("set", err)
		e.s.b.Snapshot()
		_, err = attach.CallOnce(ctx, e.s.b.Socket(), &control.Request{Op: control.OpModels})
		e.note("models", err)
	})
	e.run(ctx, 1, func(_ context.Context, rng *rand.Rand) {
		cfg := e.s.b.cfg // as it is, so that nothing is taken over; sometimes refused, after models were taken
		cfg.Models = slices.Clone(cfg.Models)
		if rng.IntN(2) == 0 {
			more := cfg.Models[0]
			more.Name = name(rng)
			bad := more
			bad.Name, bad.Policy = "bad", policy.Policy{"slots": "-1"}
			cfg.Models = append(cfg.Models, more, bad)
		}
		e.note("reload", e.s.b.Reload(cfg))
		time.Sleep(time.Millisecond)
	})
}

func newEverybody(t *testing.T) *everybody {
	e := &everybody{seen: map[string]int{}}
	e.s = serve(t, func(c *Config) { c.Loops, c.create = 3, shm.CreateOnHeap })
	return e
}

// Peers attach, declare models, and leave, while the configuration is reloaded, over
// several loops. Afterwards the broker is as before.
func TestModelsComeAndGoWhileEverybodyAttaches(t *testing.T) {
	before := openFDs(t)
	e := newEverybody(t)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	e.start(ctx)
	for began := time.Now(); ctx.Err() == nil && (time.Since(began) < time.Second || e.missing() != ""); { // on a slow machine longer
		time.Sleep(10 * time.Millisecond)
	}
	cancel()
	e.wg.Wait()
	e.s.until("only the declared model is left, and it is empty", func(st stats.Broker) bool {
		return len(st.Models) == 1 && st.Models[0].Name == "m" && st.Models[0].SlotsFree == 64 && len(st.Models[0].Workers) == 0
	})
	e.s.until("nobody uses it, and the loops have its ring alone", func(stats.Broker) bool { // the last may just be leaving
		load, rings := 0, 0
		e.s.b.models.mu.Lock()
		users := e.s.b.models.models["m"].users
		for _, n := range e.s.b.models.load {
			load += n
		}
		e.s.b.models.mu.Unlock()
		for _, l := range e.s.b.loops {
			work, _ := l.Snapshot()
			rings += work.Models
		}
		return users == 0 && load == 1 && rings == 1
	})
	t.Log(e.seen)
	if what := e.missing(); what != "" {
		t.Errorf("%s never happened: %v", what, e.seen)
	}
	e.s.end()
	for end := time.Now().Add(patience); openFDs(t) > before && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
	if after := openFDs(t); after > before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

// missing is something that has not happened yet.
func (e *everybody) missing() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, what := range []string{"worker", "client", "other SignatureMismatch", "reload Invalid", "set"} {
		if e.seen[what] == 0 {
			return what
		}
	}
	return ""
}

// expectedEnds are the errors of peers while models come and go and the broker drains.
var expectedEnds = []string{"Draining", "NoBroker", "BrokerGone", "UnknownModel", "RingFull", "SignatureMismatch", "Invalid"}

// During a drain every peer gets an answer or the end of its connection, and the broker
// ends.
func TestABrokerDrainsWhileEverybodyAttaches(t *testing.T) {
	for i := range 5 {
		e := newEverybody(t)
		ctx, cancel := context.WithCancel(context.Background())
		e.start(ctx)
		time.Sleep(time.Duration(20*i) * time.Millisecond)
		e.s.stop()
		e.s.end()
		cancel()
		e.wg.Wait()
		if err := <-e.s.served; err != nil {
			t.Errorf("the broker ended with %v", err)
		}
		e.s.served <- nil
		for what := range e.seen {
			if what == "worker" || what == "client" || what == "models" || what == "set" || what == "reload" {
				continue
			}
			if _, code, _ := strings.Cut(what, " "); !slices.Contains(expectedEnds, code) {
				t.Errorf("unexpected: %s", what)
			}
		}
	}
}

// Two workers declare a model at the same time: one makes it, the other
// waits for that; if the first cannot, the second does.
func TestAModelIsMadeByOneAndAwaitedByOthers(t *testing.T) {
	s := serve(t, func(c *Config) { c.Loops = 2 })
	g := s.b.models
	m, mine, err := g.reserveName("x")
	if err != nil || !mine {
		t.Fatal(mine, err)
	}
	got := make(chan bool)
	for range 3 {
		go func() {
			_, mine, err := g.reserveName("x")
			if err != nil {
				t.Error(err)
			}
			got <- mine
		}()
	}
	select {
	case <-got:
		t.Fatal("a model that is being made was given away")
	case <-time.After(20 * time.Millisecond):
	}
	g.abandonModel(m)
	if !<-got {
		t.Error("nobody makes the model that was abandoned")
	}
	g.mu.Lock()
	m = g.models["x"]
	g.mu.Unlock()
	must.Do(t, s.b.makeModel(m, ModelConfig{Signature: s.b.cfg.Models[0].Signature, Name: "x", Policy: policy.New(policy.Slots(64))}))
	g.publishModel(m, true)
	for range 2 {
		if <-got {
			t.Error("it was made again")
		}
	}
	for range 3 {
		g.leaveModel(m)
	}
	if _, _, err := g.takeStage("x"); !errors.Is(err, status.ErrUnknownModel) {
		t.Errorf("after the last has left: %v", err)
	}
	s.until("its ring is gone", func(stats.Broker) bool { return !m.ring.Do(func() {}) })
}

func TestABrokerThatHasEndedHasNoModels(t *testing.T) {
	s := serve(t, nil)
	s.end()
	if st := s.b.Snapshot(); len(st.Models) != 0 {
		t.Error("a broker that has ended still answers")
	}
	if err := s.b.Reload(Config{}); !errors.Is(err, status.ErrDraining) {
		t.Errorf("reload of a broker that has ended: %v", err)
	}
}

// Models go to the loop with the fewest rings and sessions.
func TestModelsGoToTheLoopWithTheLeastToDo(t *testing.T) {
	b := &Broker{cfg: Config{create: shm.CreateUnshared}, log: slog.New(slog.DiscardHandler)}
	for i := range 3 {
		l, err := engine.NewLoop(i, outside{b})
		must.Do(t, err)
		defer l.Close()
		defer l.ReleaseRings()
		b.loops = append(b.loops, l)
	}
	b.models = newRegistry(1, b.loops)
	var models []*model
	add := func() {
		mc := ModelConfig{Name: fmt.Sprint("m", len(models))}
		must.Do(t, mc.ParseTensors([]string{"x:i64[1]"}, []string{"y:i64[1]"}, nil))
		m, _, err := b.models.reserveName(mc.Name)
		if err == nil {
			err = m.buildRing(b, mc)
		}
		must.Do(t, err)
		b.models.placeModel(m)
		m.loop.AdoptRing(m.ring)
		b.models.publishModel(m, false)
		models = append(models, m)
	}
	on := func(i int) int { return slices.Index(b.loops, models[i].loop) }
	for range 4 {
		add()
	}
	if on(0) != 0 || on(1) != 1 || on(2) != 2 || on(3) != 0 {
		t.Fatalf("models are on loops %d %d %d %d", on(0), on(1), on(2), on(3))
	}
	for _, m := range []*model{models[1], models[1], models[1], models[2]} {
		b.models.joinModel(m)
	}
	add()
	add()
	if on(4) != 0 || on(5) != 2 {
		t.Errorf("with loads 2, 4, 2 models went to loops %d and %d", on(4), on(5))
	}
}
