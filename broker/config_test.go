// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"errors"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

func spec(t *testing.T, text string) tensor.Spec {
	t.Helper()
	s, err := tensor.ParseSpec(text)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestAModelThatCannotBeIsRefusedByName(t *testing.T) {
	good := func() ModelConfig {
		return ModelConfig{
			Name: "m", Policy: policy.New(policy.Slots(16), policy.MaxBatchSize(4)),
			Signature: tensor.Signature{Inputs: []tensor.Spec{spec(t, "x:f32[<=8,2]")}, Outputs: []tensor.Spec{spec(t, "y:f32[2]")}},
		}
	}
	dir := t.TempDir()
	try := func(models ...ModelConfig) error {
		b, err := New(Config{Socket: filepath.Join(dir, "s"), OpenFolder: true, Models: models, Logger: slog.New(slog.DiscardHandler)})
		if err == nil {
			b.release()
		}
		return err
	}
	if err := try(good()); err != nil {
		t.Fatal(err)
	}
	for what, change := range map[string]func(*ModelConfig){
		"no name":                    func(m *ModelConfig) { m.Name = "" },
		"a name with blanks":         func(m *ModelConfig) { m.Name = "a b" },
		"a long name":                func(m *ModelConfig) { m.Name = strings.Repeat("n", tensor.MaxNameBytes+1) },
		"no signature":               func(m *ModelConfig) { m.Signature = tensor.Signature{} },
		"fewer slots than a batch":   func(m *ModelConfig) { m.Policy["slots"] = "3" },
		"too many slots":             func(m *ModelConfig) { m.Policy["slots"] = strconv.Itoa(shm.MaxSlots + 1) },
		"a huge batch":               func(m *ModelConfig) { m.Policy = policy.New(policy.MaxBatchSize(shm.MaxBatchRows + 1)) },
		"descending preferred sizes": func(m *ModelConfig) { m.Policy["preferred_batch_sizes"] = "4,2" },
		"an unknown key":             func(m *ModelConfig) { m.Policy["wait_tme"] = "1" },
		"buckets below the maximum":  func(m *ModelConfig) { m.Policy["buckets.x.0"] = "4" },
	} {
		m := good()
		change(&m)
		if err := try(m); !errors.Is(err, status.ErrInvalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := try(good(), good()); !errors.Is(err, status.ErrInvalid) {
		t.Errorf("a model declared twice: %v", err)
	}
	if err := try(good()); err != nil {
		t.Errorf("after all that: %v", err)
	}
}

func TestASocketThatCannotBeIsRefusedByName(t *testing.T) {
	dir := t.TempDir()
	try := func(socket string, open bool) error {
		b, err := New(Config{Socket: socket, OpenFolder: open, Logger: slog.New(slog.DiscardHandler)})
		if err == nil {
			b.release()
		}
		return err
	}
	long := filepath.Join(dir, strings.Repeat("x", 108))
	if err := try(long, true); !errors.Is(err, status.ErrInvalid) {
		t.Errorf("a long path: %v", err)
	}
	longest := dir + "/" + strings.Repeat("x", MaxSocketPath-len(dir)-1)
	if err := try(longest, true); err != nil {
		t.Errorf("the longest path: %v", err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := try(filepath.Join(dir, "s"), false); !errors.Is(err, status.ErrForbidden) {
		t.Errorf("a folder that others may enter: %v", err)
	}
	inside := filepath.Join(dir, "made", "s")
	if err := try(inside, false); err != nil {
		t.Errorf("a folder that it made itself: %v", err)
	}
	if st, err := os.Stat(filepath.Dir(inside)); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("that folder: %v, %v", st.Mode(), err)
	}
	left, _ := filepath.Glob(filepath.Join(dir, "s*"))
	if len(left) > 0 {
		t.Errorf("left behind: %s", left)
	}
}

func TestWindowsAreLeasedLowestFirstAndComeBack(t *testing.T) {
	w := newWindows(10)
	a, _ := w.lease(4)
	b, _ := w.lease(4)
	if _, ok := w.lease(3); ok || a != 0 || b != 4 || w.free != 2 {
		t.Errorf("windows at %d and %d, %d free", a, b, w.free)
	}
	w.giveBack(a, 4)
	if c, ok := w.lease(3); !ok || c != 0 {
		t.Errorf("a window at %d", c)
	}
	if _, ok := w.lease(4); ok {
		t.Error("a window out of two pieces")
	}
}

// The list of gaps is compared with a plain list of slots.
func TestWindowsComeAndGoInAnyOrder(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	const slots = 50
	w, used := newWindows(slots), make([]bool, slots)
	type window struct{ first, n int }
	var leased []window
	for range 20_000 {
		if len(leased) > 0 && rng.IntN(2) == 0 {
			i := rng.IntN(len(leased))
			x := leased[i]
			leased = slices.Delete(leased, i, i+1)
			w.giveBack(uint32(x.first), x.n)
			for j := range x.n {
				used[x.first+j] = false
			}
			continue
		}
		n := 1 + rng.IntN(12)
		want, run := -1, 0
		for i := range used {
			if run++; used[i] {
				run = 0
			}
			if run == n {
				want = i - n + 1
				break
			}
		}
		first, ok := w.lease(n)
		if ok != (want >= 0) || ok && int(first) != want {
			t.Fatalf("%d slots of %v: %d, %v, not %d", n, used, first, ok, want)
		}
		if ok {
			leased = append(leased, window{want, n})
			for j := range n {
				used[want+j] = true
			}
		}
	}
	free := 0
	for _, u := range used {
		if !u {
			free++
		}
	}
	if w.free != free {
		t.Errorf("%d free, not %d", w.free, free)
	}
}
