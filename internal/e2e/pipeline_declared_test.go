// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/worker"
)

func TestAPolicyIsSetForAStageAndNotForThePipeline(t *testing.T) {
	h := newHost(t, thePipeline)
	a := admin.New(h.socket)
	ctx := background(t)
	must.Do(t, a.Set(ctx, "m/s2", map[string]string{"wait_time": "7ms", "max_batch_size": "4"}))
	if s := h.model("m/s2"); s.Policy["wait_time"] != "7ms" || h.model("m/s1").Policy["wait_time"] != "1ms" || h.model("m").MaxBatchSize != 4 {
		t.Errorf("%v", s.Policy)
	}
	for name, want := range map[string]error{"m": status.ErrInvalid, "m/s9": status.ErrUnknownModel, "m/": status.ErrUnknownModel, "x/s2": status.ErrUnknownModel} {
		if err := a.Set(ctx, name, map[string]string{"wait_time": "7ms"}); !errors.Is(err, want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := a.Set(ctx, "m/s2", map[string]string{"private": "true"}); !errors.Is(err, status.ErrInvalid) {
		t.Error(err)
	}
	w := worker.Config{Socket: h.socket, Model: "m", Signature: thePipeline.Signature()}
	if _, err := worker.Attach(ctx, w); !errors.Is(err, status.ErrInvalid) {
		t.Errorf("a worker of the whole pipeline: %v", err)
	}
	if w.Model = "m/s2"; true {
		if _, err := worker.Attach(ctx, w); !errors.Is(err, status.ErrSignatureMismatch) {
			t.Errorf("a worker of another signature: %v", err)
		}
	}
}

const declared = `{"inputs": ["x:i64[16]"], "policy": {"slots": "64", "max_batch_size": "8"}, "stages": [
	{"name": "s1", "inputs": ["x"], "outputs": ["h1:i64[16]"], "policy": {"max_batch_size": "4"}},
	{"name": "s2", "inputs": ["x", "h1"], "outputs": ["h2:i64[16]"]},
	{"name": "s3", "inputs": ["x", "h2"], "outputs": ["y:i64[16]"]}]}`

func TestWorkersDeclareAPipelineThatGoesWithTheLastOfThem(t *testing.T) {
	h := newHost(t) // no models
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for k := 3; k >= 1; k-- {
		cfg := thePipeline.StageConfig(k, h.socket)
		cfg.Pipeline = declared
		wg.Go(func() {
			err := worker.Serve(ctx, cfg, func(_ context.Context, b *worker.Batch) error {
				for i := range b.Rows() {
					thePipeline.RunStage(k, b, i)
				}
				return nil
			})
			if err != nil && !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		})
	}
	c := h.dial()
	works(t, c, 30)
	if m := c.Model(); m.MaxBatchSize != 4 {
		t.Errorf("%+v", m)
	}
	for text, want := range map[string]error{
		"{": status.ErrInvalid, `{"stages": []}`: status.ErrInvalid, `{"inputs": ["x:i64[1]"], "stages": [{"name": "s1", "inputs": ["x"], "outputs": ["y:i64[1]"]}]}`: status.ErrSignatureMismatch,
	} {
		cfg := thePipeline.StageConfig(1, h.socket)
		cfg.Pipeline = text
		if _, err := worker.Attach(background(t), cfg); !errors.Is(err, want) {
			t.Errorf("%s: %v", text, err)
		}
	}
	c.Close()
	stop()
	wg.Wait()
	h.eventually("it is forgotten", func() error {
		if n := len(h.stats().Models); n != 0 {
			return fmt.Errorf("%d lines", n)
		}
		return nil
	})
	h.settled()
}
