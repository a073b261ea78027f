// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/broker/supervise"
	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// A worker may declare a model before the file does. Then the model belongs to the file,
// with its workers, and does not go with the first worker.
func TestAReloadedFileTakesOverAModelThatAWorkerDeclared(t *testing.T) {
	s := serve(t, func(c *Config) { c.Models = nil })
	first, err := attach.Open(context.Background(), s.b.Socket(), workerOf("m"))
	must.Do(t, err)
	sig, err := tensor.ParseSignature([]string{"x:f32[4]"}, []string{"y:f32[4]"})
	must.Do(t, err)
	cfg := s.b.cfg
	cfg.Models = []ModelConfig{{Name: "m", Signature: sig, Workers: []supervise.Worker{worker()}}}
	must.Do(t, s.b.Reload(cfg))
	s.until("the file's worker is there too", attached(2))
	first.Close()
	s.until("it is alone", attached(1))
	if err := s.b.Reload(cfg); err != nil || len(s.stats().Processes) != 1 {
		t.Errorf("read once more: %v, processes %+v", err, s.stats().Processes)
	}
	if strings.Contains(s.log.String(), "restart of the broker") {
		t.Error(s.log)
	}
}

// A worker that names a stage before the file declares the pipeline makes a model of
// that name, and every worker after it would join that model.
func TestAStageAndAModelOfOneNameAreRefused(t *testing.T) {
	s := serve(t, func(c *Config) { c.Models = nil })
	early := workerOf("line/net")
	first, err := attach.Open(context.Background(), s.b.Socket(), early)
	must.Do(t, err)
	sig, err := tensor.ParseSignature([]string{"x:f32[4]"}, []string{"y:f32[4]"})
	must.Do(t, err)
	cfg, without := s.b.cfg, s.b.cfg
	cfg.Models = []ModelConfig{{Name: "line", Signature: sig, Stages: []StageConfig{{Name: "net", Signature: sig}}}}
	refused := func(err error, want string) {
		t.Helper()
		if !errors.Is(err, status.ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
	refused(s.b.Reload(cfg), `pipeline "line": its stage has the name of a model that is there, "line/net"; a worker`)
	first.Close()
	s.until("the model is forgotten", func(b stats.Broker) bool { return len(b.Models) == 0 })
	must.Do(t, s.b.Reload(cfg))
	second, err := attach.Open(context.Background(), s.b.Socket(), early)
	must.Do(t, err)
	defer second.Close()
	s.until("it is the stage's worker", func(b stats.Broker) bool {
		return slices.ContainsFunc(b.Models, func(m stats.Model) bool { return m.Name == "line" && m.WorkersAttached == 1 })
	})
	plain := ModelConfig{Name: "line/net", Signature: sig}
	without.Models = []ModelConfig{plain}
	refused(s.b.Reload(without), `model "line/net": that is the name of a stage of the pipeline "line"`)
	cfg.Models = append(cfg.Models, plain)
	refused(s.b.Reload(cfg), "the name of a stage")
	refused(checkNames([]ModelConfig{cfg.Models[1], cfg.Models[0]}), "the name of a stage")
}

// Ending a worker would not help there.
func TestAStageInPlaceOfADeclaredModelTakesARestart(t *testing.T) {
	s := serve(t, func(c *Config) { c.Models[0].Name = "line/net" })
	cfg := s.b.cfg
	sig := cfg.Models[0].Signature
	cfg.Models = []ModelConfig{{Name: "line", Signature: sig, Stages: []StageConfig{{Name: "net", Signature: sig}}}}
	if err := s.b.Reload(cfg); !errors.Is(err, status.ErrInvalid) || !strings.Contains(err.Error(), "restart the broker") {
		t.Error(err)
	}
}

func TestAReloadNamesWhatTakesARestart(t *testing.T) {
	s := serve(t, nil)
	cfg := s.b.cfg
	cfg.AllowedUIDs, cfg.DrainTime, cfg.MaxClients, cfg.Loops = []int{1001}, time.Minute, 3, s.b.cfg.Loops+1
	cfg.Workers = []supervise.Worker{worker()}
	m := cfg.Models[0]
	m.Policy, m.Workers = policy.New(policy.Slots(128)), []supervise.Worker{worker()}
	cfg.Models = []ModelConfig{m}
	must.Do(t, s.b.Reload(cfg))
	cfg = s.b.cfg
	cfg.Models = nil
	must.Do(t, s.b.Reload(cfg))
	for _, want := range []string{`changes="allow_uids, drain_time, loops, m.slots, max_clients"`, `changes="m (no longer named)"`} {
		if !strings.Contains(s.log.String(), want) {
			t.Errorf("the log lacks %s:\n%s", want, s.log)
		}
	}
	<-s.b.applied
	if st := s.stats(); len(st.Models) != 1 || len(st.Processes) != 1 || st.Processes[0].Model != "m" {
		t.Errorf("%+v", st)
	}
}
