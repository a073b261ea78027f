// SPDX-License-Identifier: Apache-2.0

package policyflag_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/broker/configfile"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/internal/policyflag"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// sample is a setting as a flag, in a file, and in the broker, and a value that is refused.
type sample struct{ key, flag, toml, is, bad string }

var samples = []sample{
	{"max_batch_size", "16", "16", "16", "0"},
	{"max_batch_cost", "8192", "8192", "8192", "-1"},
	{"cost", "x.1", `"x.1"`, "x.1", "y"},
	{"wait_time", "0.005", `"5ms"`, "5ms", "soon"},
	{"latency_goal", "0.02", `"20ms"`, "20ms", "-1ms"},
	{"preferred_batch_sizes", "8,16", "[8, 16]", "8,16", "x"},
	{"slots", "64", "64", "64", "-1"},
	{"max_window", "48", "48", "48", "-1"},
	{"private", "true", "true", "true", "perhaps"},
	{"lease", "90s", "90", "90s", "0"},
	{"max_attempts", "2", "2", "2", "0"},
	{"no_worker", "refuse", `"refuse"`, "refuse", "perhaps"},
	{"ragged", "true", "true", "true", "perhaps"},
	{"preserve_order", "true", "true", "true", "perhaps"},
	{"priorities", "3", "3", "3", "64"},
	{"default_priority", "0", "0", "0", "-1"},
	{"ageing", "1m30s", "90.0", "90s", "nan"},
	{"max_queue", "7", "7", "7", "-7"},
	{"default_timeout", "250us", `"250us"`, "250us", "-1ms"},
	{"max_timeout", "1h", "3600", "3600s", "48h"},
	{"on_timeout", "delay", `"delay"`, "delay", "wait"},
	{"buckets.x.0", "4,8", "[4, 8]", "4,8", "4"},
}

// host is a broker in this process.
type host struct {
	t      *testing.T
	socket string
	sig    tensor.Signature
	broker *broker.Broker
	log    *bytes.Buffer // to be read only while the broker says nothing
}

func serve(t *testing.T, models ...broker.ModelConfig) (*host, error) {
	sig, err := tensor.ParseSignature([]string{"x:i32[<=8,<=8]"}, []string{"y:i32[1]"})
	must.Do(t, err)
	dir, err := os.MkdirTemp("", "rb") // t.TempDir is too long for a socket
	must.Do(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	h := &host{t: t, socket: filepath.Join(dir, "s", "b"), sig: sig, log: &bytes.Buffer{}}
	b, err := broker.New(broker.Config{Socket: h.socket, Models: models, Logger: slog.New(slog.NewTextHandler(h.log, nil)),
		DrainTime: -1})
	if err != nil {
		return nil, err
	}
	h.broker = b
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- b.Serve(ctx) }()
	t.Cleanup(func() {
		stop()
		must.Check(t, <-ended)
	})
	return h, nil
}

// inForce is the policy of the one model.
func (h *host) inForce() policy.Policy {
	h.t.Helper()
	models, err := admin.New(h.socket).Models(h.t.Context())
	if err != nil || len(models) != 1 {
		h.t.Fatalf("%v, %v", models, err)
	}
	return models[0].Policy
}

// declare attaches a worker that declares the model.
func (h *host) declare(p policy.Policy) error {
	w, err := worker.Attach(h.t.Context(), worker.Config{Model: "m", Signature: h.sig, Socket: h.socket, Policy: p})
	if err == nil {
		h.t.Cleanup(w.Close)
	}
	return err
}

// ways are all ways to set a key in Go. C and Python set keys as the worker does.
var ways = map[string]func(t *testing.T, s sample, value, toml string) (policy.Policy, error){
	"file": func(t *testing.T, s sample, _, toml string) (policy.Policy, error) {
		key, part, ok := strings.Cut(s.key, ".")
		line := key + " = " + toml
		if ok {
			line = key + " = { \"" + part + "\" = " + toml + " }"
		}
		cfg, err := configfile.Parse("[[model]]\nname = \"m\"\ninputs = [\"x:i32[<=8,<=8]\"]\noutputs = [\"y:i32[1]\"]\n" + line + "\n")
		if err != nil {
			return nil, err
		}
		h, err := serve(t, cfg.Models...)
		if err != nil {
			return nil, err
		}
		return h.inForce(), nil
	},
	"flag": func(t *testing.T, s sample, value, _ string) (policy.Policy, error) {
		f := pflag.NewFlagSet("x", pflag.ContinueOnError)
		f.SetOutput(io.Discard)
		flags := policyflag.Add(f)
		name := policyflag.Name(s.key)
		arg := "--" + name + "=" + value
		if f.Lookup(name) == nil {
			arg = "--policy=" + s.key + "=" + value
		}
		must.Do(t, f.Parse([]string{arg}))
		p, err := flags.Policy()
		if err != nil {
			return nil, err
		}
		sig, _ := tensor.ParseSignature([]string{"x:i32[<=8,<=8]"}, []string{"y:i32[1]"})
		h, err := serve(t, broker.ModelConfig{Name: "m", Signature: sig, Policy: p})
		if err != nil {
			return nil, err
		}
		return h.inForce(), nil
	},
	"worker": func(t *testing.T, s sample, value, _ string) (policy.Policy, error) {
		h, err := serve(t)
		if err == nil {
			err = h.declare(policy.Policy{s.key: value})
		}
		if err != nil {
			return nil, err
		}
		return h.inForce(), nil
	},
	"set": func(t *testing.T, s sample, value, _ string) (policy.Policy, error) {
		h, err := serve(t)
		if err == nil {
			err = h.declare(nil)
		}
		if err != nil {
			return nil, err
		}
		before := h.inForce()
		if err := admin.New(h.socket).Set(t.Context(), "m", policy.Policy{s.key: value}); err != nil {
			if after := h.inForce(); !maps.Equal(before, after) {
				t.Errorf("a refused set made %s of %s", after, before)
			}
			return nil, err
		}
		return h.inForce(), nil
	},
}

func TestEveryKeyMeansTheSameWhateverWayItIsSet(t *testing.T) {
	tried := map[string]bool{}
	for _, s := range samples {
		base, _, _ := strings.Cut(s.key, ".")
		tried[base] = true
		var key policy.Key
		for _, k := range policy.Keys() {
			if k.Name == base {
				key = k
			}
		}
		t.Run(s.key, func(t *testing.T) {
			var first policy.Policy
			for way, set := range ways {
				got, err := set(t, s, s.flag, s.toml)
				if way == "set" && !key.Live {
					if !errors.Is(err, status.ErrInvalid) || !strings.Contains(err.Error(),
						"cannot change while the model runs; these can: max_batch_size, ") {
						t.Errorf("set: %v", err)
					}
					continue
				}
				if err != nil {
					t.Errorf("%s: %v", way, err)
					continue
				}
				is := got[s.key]
				if key.PerLevel {
					is = got[s.key+".0"]
				}
				if is != s.is {
					t.Errorf("%s: it is %q, want %q", way, is, s.is)
				}
				if way != "set" { // where max_batch_size leaves the slots as they are
					if first == nil {
						first = got
					}
					if !maps.Equal(got, first) {
						t.Errorf("%s: %s\nanother way: %s", way, got, first)
					}
				}
			}
		})
	}
	for _, k := range policy.Keys() {
		if !tried[k.Name] {
			t.Errorf("%s is not tried", k.Name)
		}
	}
}

func beforeList(says string) string {
	before, _, _ := strings.Cut(says, "; known are ")
	return before
}

func TestABadValueHasTheSameErrorWhateverWayItIsSet(t *testing.T) {
	for _, s := range append(samples, sample{key: "wait_tme", bad: "1"}) {
		t.Run(s.key, func(t *testing.T) {
			p := policy.Policy{s.key: s.bad}
			_, want := p.Resolve([]tensor.Spec{{Name: "x", DType: tensor.I32, Shape: []int{8, 8}, Variable: []int{0, 1}}})
			if want == nil {
				t.Fatalf("%s is fine", p)
			}
			live := p.CheckLive() == nil
			for way, set := range ways {
				_, err := set(t, s, s.bad, `"`+s.bad+`"`)
				got, says := fmt.Sprint(err), want.Error()
				if way == "file" { // which has more keys
					got, says = beforeList(got), beforeList(says)
				}
				if !errors.Is(err, status.ErrInvalid) || !strings.HasSuffix(got, says) && (live || way != "set") {
					t.Errorf("%s: %v\nwant: %v", way, err, want)
				}
			}
		})
	}
}

func TestAReloadChangesWhatIsLiveAndNamesTheRest(t *testing.T) {
	declared := func(text string) broker.ModelConfig {
		cfg, err := configfile.Parse("[[model]]\nname = \"m\"\ninputs = [\"x:i32[<=8,<=8]\"]\noutputs = [\"y:i32[1]\"]\nmax_batch_size = " +
			"16\n" + text)
		must.Do(t, err)
		return cfg.Models[0]
	}
	h, err := serve(t, declared(""))
	must.Do(t, err)
	for _, s := range samples {
		if strings.Contains(s.key, ".") || s.key == "max_batch_size" {
			continue
		}
		before := h.inForce()
		if err := h.broker.Reload(broker.Config{Socket: h.socket,
			Models: []broker.ModelConfig{declared(s.key + " = " + s.toml)}}); err != nil {
			t.Fatal(err)
		}
		after, name := h.inForce(), s.key
		if _, ok := after[name]; !ok {
			name += ".0"
		}
		live, _ := policy.Policy{s.key: s.flag}.Live()
		if named := strings.Contains(h.log.String(), "m."+s.key); named == (len(live) > 0) {
			t.Errorf("%s: the log names it: %v", s.key, named)
		}
		if len(live) > 0 && after[name] != s.is || len(live) == 0 && after[name] != before[name] {
			t.Errorf("%s is %q", s.key, after[name])
		}
	}
	// A key that the file no longer sets takes its default again.
	must.Do(t, h.broker.Reload(broker.Config{Socket: h.socket, Models: []broker.ModelConfig{declared("")}}))
	if p := h.inForce(); p["wait_time"] != "auto" || p["priorities"] != "1" || p["max_batch_size"] != "16" {
		t.Error(p)
	}
}
