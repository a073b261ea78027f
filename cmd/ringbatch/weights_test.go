// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"encoding/json"
	"math"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker/weights"
)

func TestWeightsAreLoadedListedAndWithdrawn(t *testing.T) {
	c := startCLI(t)
	const file = "../../internal/safetensors/testdata/bf16.safetensors"
	must.Do(t, syscall.Mkfifo(c.bed.Path("pipe"), 0o600))
	version := func() uint32 {
		t.Helper()
		var list []stats.Weights
		must.Do(t, json.Unmarshal([]byte(c.must("weights", "m", "--json")), &list))
		return list[0].Version
	}
	for _, bad := range []struct{ says, args string }{
		{"no model has live weights", "weights"},
		{"nothing was published", "weights m"},
		{"nothing was published", "weights m --withdraw"},
		{"take a MODEL", "weights --load " + file},
		{"no such file", "weights m --load absent.safetensors"},
		{"safetensors", "weights m --load cli_test.go"},
		{"not a regular file", "weights m --load " + c.bed.Path("pipe")},
	} {
		if out, _ := c.run(strings.Fields(bad.args)...); !strings.Contains(out, bad.says) {
			t.Errorf("ringbatch %s: %s", bad.args, out)
		}
	}
	c.must("weights", "m", "--load", file)
	c.must("weights", "m", "--load", file)
	if v := version(); v != 2 {
		t.Errorf("version %d, not 2", v)
	}
	c.must("weights", "m", "--withdraw")
	if out := c.must("weights"); version() != 1 || !strings.Contains(out, "version 2 of m is withdrawn") {
		t.Errorf("version %d\n%s", version(), out)
	}
	if out, code := c.run("weights", "m", "--withdraw"); code == 0 {
		t.Error("withdrawn twice:", out)
	}
	c.must("weights", "m", "--load", file)
	if v := version(); v != 3 {
		t.Errorf("version %d, not 3", v)
	}
}

// All weights of the mlp are 0 and its last biases the version, so its answers are the version.
func TestTheMLPFollowsItsWeightsBeyondATakeOver(t *testing.T) {
	c := startCLI(t)
	specs, err := tensor.ParseSpecs(strings.Fields("layers.0.weight:f32[4096,1024] layers.0.bias:f32[4096] "+
		"layers.1.weight:f32[4096,4096] layers.1.bias:f32[4096] layers.2.weight:f32[1024,4096] layers.2.bias:f32[1024]"), nil)
	must.Do(t, err)
	p, err := weights.NewPublisher(t.Context(), "mlp", specs)
	must.Do(t, err)
	defer p.Close()
	publish := func(want float32) {
		t.Helper()
		b, err := p.Begin(t.Context())
		must.Do(t, err)
		for at := b.Tensor(5); len(at) > 0; at = at[4:] {
			binary.NativeEndian.PutUint32(at, math.Float32bits(want))
		}
		if v, err := p.Publish(b); err != nil || float32(v) != want {
			t.Fatalf("published version %d, %v; not %v", v, err, want)
		}
	}
	publish(1)
	c.start("worker", "mlp", "--live", "--wait", "1m")
	cl, err := client.Dial(t.Context(), "mlp", client.WaitForModel(), client.WithRetry(time.Minute))
	must.Do(t, err)
	defer cl.Close()
	ask := func() float32 {
		t.Helper()
		y := make([]float32, 1024)
		must.Do(t, cl.InferInto(t.Context(), []any{y}, make([]float32, 1024)))
		if slices.Min(y) != slices.Max(y) {
			t.Fatalf("weights of several versions: %v to %v", slices.Min(y), slices.Max(y))
		}
		return y[0]
	}
	publish(2)
	if got := ask(); got != 2 {
		t.Errorf("answered with version %v, not 2", got)
	}
	old := c.broker
	c.broker = c.takesOver()
	c.hasEnded(old)
	if got := ask(); got != 2 {
		t.Errorf("answered with version %v after the take-over, not 2", got)
	}
	publish(3)
	c.until("version 3 answers", func() bool { return ask() == 3 })
}
