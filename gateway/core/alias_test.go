// SPDX-License-Identifier: Apache-2.0

package core_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/alias"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/worker"
)

// times is a model that multiplies.
func times(factor float32) worker.Func {
	return func(_ context.Context, b *worker.Batch) error {
		for i := range b.Rows() {
			x, y := worker.Row[float32](b.Input(0), i), worker.Row[float32](b.Output(0), i)
			for j := range x {
				y[j] = factor * x[j]
			}
		}
		return nil
	}
}

// alias has m stand for other models.
func (r *rig) alias(targets ...string) {
	r.t.Helper()
	a, err := alias.Parse("m", targets...)
	if err == nil {
		err = admin.New(r.socket).SetAlias(soon(r.t), a, false)
	}
	must.Do(r.t, err)
}

func TestAnAliasSharesRequestsAndIsSwitchedUnderLoadWithoutALostOne(t *testing.T) {
	t.Parallel()
	one, two := modelConfig(t, "m@1", []string{"x:f32[4]"}, []string{"y:f32[4]"}), modelConfig(t, "m@2", []string{"x:f32[4]"},
		[]string{"y:f32[4]"})
	wide := modelConfig(t, "m@wide", []string{"x:f32[5]"}, []string{"y:f32[5]"})
	r := newRig(t, nil, one, two, wide)
	r.worker(one, times(1))
	r.worker(two, times(2))
	r.worker(wide, times(3))
	r.alias("m@1")
	good := goodBody
	r.until("the alias is served", func() bool { return r.infer("m", good).status == 200 })

	var answers [4]atomic.Int64 // by version
	var callers sync.WaitGroup
	stop := make(chan struct{})
	for range 4 {
		callers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				a := r.infer("m", good)
				if a.status != 200 || a.Model != "m" || len(a.Outputs) != 1 || fmt.Sprint(a.Outputs[0].Data[0]) != a.Version {
					t.Errorf("%d %q: %s version %s: %v", a.status, a.Error, a.Model, a.Version, a.Outputs)
					return
				}
				answers[int(a.Outputs[0].Data[0].(float64))].Add(1)
			}
		})
	}
	end := sync.OnceFunc(func() { close(stop); callers.Wait() })
	defer end()
	for i := range 6 {
		to := 2 - i%2
		r.alias(fmt.Sprintf("m@%d", to))
		n := answers[to].Load()
		r.until("the other version answers", func() bool { return answers[to].Load() >= n+20 || t.Failed() })
	}
	end()

	r.alias("m@1=80", "m@2=20")
	r.until("the share is known", func() bool { return r.g.TargetsOf("m") == 2 })
	var shares [4]int
	for range 100 {
		shares[int(r.infer("m", good).Outputs[0].Data[0].(float64))]++
	}
	if shares[2] < 18 || shares[2] > 22 { // where in the alias's turns they begin is chance: 18 to 21, counted over all beginnings
		t.Errorf("of 100 requests the versions got %v", shares)
	}

	// A version by its name, whether the alias stands for it or not.
	for path, want := range map[string]string{"m/versions/1": "1", "m/versions/2": "2", "m@2": "1"} {
		if a := r.post("/v2/models/"+path+"/infer", nil, []byte(good)); a.status != 200 || a.Version != want {
			t.Errorf("%s: %d %q, version %s", path, a.status, a.Error, a.Version)
		}
	}
	r.post("/v2/models/m/versions/wide/infer", nil, []byte(good)).is(t, "another signature", 400, "shape")
	r.post("/v2/models/m/versions/7/infer", nil, []byte(good)).is(t, "no such version", 404, "1, 2")
	meta, err := r.client().ModelMetadata(soon(t), &oip.ModelMetadataRequest{Name: "m"})
	if err != nil || meta.Name != "m" || !slices.Equal(meta.Versions, []string{"1", "2"}) {
		t.Errorf("metadata: %v, %v", meta, err)
	}
	r.until("it is ready", func() bool {
		rep, err := r.client().ModelReady(soon(t), &oip.ModelReadyRequest{Name: "m"})
		return err == nil && rep.Ready
	})
}
