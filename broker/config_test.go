// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// tryNew makes a broker and releases it.
func tryNew(cfg Config) error {
	cfg.Logger = slog.New(slog.DiscardHandler)
	b, err := New(cfg)
	if err == nil {
		b.release()
	}
	return err
}

func TestAModelThatCannotBeIsRefusedByName(t *testing.T) {
	sig, err := tensor.ParseSignature([]string{"x:f32[<=8,2]"}, []string{"y:f32[2]"})
	must.Do(t, err)
	good := func() ModelConfig {
		return ModelConfig{Name: "m", Policy: policy.New(policy.Slots(16), policy.MaxBatchSize(4)), Signature: sig}
	}
	dir := t.TempDir()
	try := func(models ...ModelConfig) error {
		return tryNew(Config{Socket: filepath.Join(dir, "s"), OpenFolder: true, Models: models})
	}
	must.Do(t, try(good()))
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
	try := func(socket string, open bool) error { return tryNew(Config{Socket: socket, OpenFolder: open}) }
	must.Fail(t, "a long path", try(filepath.Join(dir, strings.Repeat("x", 108)), true), status.ErrInvalid)
	must.Check(t, try(dir+"/"+strings.Repeat("x", MaxSocketPath-len(dir)-1), true)) // the longest path
	must.Do(t, os.Chmod(dir, 0o755))
	must.Fail(t, "a folder that others may enter", try(filepath.Join(dir, "s"), false), status.ErrForbidden)
	inside := filepath.Join(dir, "made", "s")
	must.Check(t, try(inside, false))
	must.Fail(t, "a missing folder above the socket's", try(filepath.Join(dir, "no", "such", "s"), false), os.ErrNotExist)
	if _, err := os.Stat(filepath.Join(dir, "no")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder above was made: %v", err)
	}
	if st, err := os.Stat(filepath.Dir(inside)); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("that folder: %v, %v", st.Mode(), err)
	}
	left, _ := filepath.Glob(filepath.Join(dir, "s*"))
	if len(left) > 0 {
		t.Errorf("left behind: %s", left)
	}
}
