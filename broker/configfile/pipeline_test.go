// SPDX-License-Identifier: Apache-2.0

package configfile

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
)

const plainPipeline = `[[model]]
name = "p"
inputs = ["x:f32[<=8]", "z:f32[2]"]
ragged = true
wait_time = "3ms"
[[model.stage]]
name = "a"
inputs = ["x"]
outputs = ["h:f32[4]"]
max_batch_size = 4
[[model.stage.worker]]
command = ["a"]
instances = 2
[[model.stage]]
name = "b"
inputs = ["h", "z"]
outputs = ["y:f32[<=3]"]
`

func TestAPipelineIsReadWithTheWorkersAndSettingsOfEachStage(t *testing.T) {
	cfg, err := Parse(plainPipeline)
	must.Do(t, err)
	m := cfg.Models[0]
	if signatures(&m) != "x:f32[<=8] z:f32[2] -> y:f32[<=3]; h:f32[4] z:f32[2] -> y:f32[<=3]" ||
		m.Stages[0].Workers[0].Instances != 2 || m.Stages[0].Policy["max_batch_size"] != "4" || m.Policy["wait_time"] != "3ms" {
		t.Errorf("%+v", m)
	}
	must.Do(t, m.Check())
	saved := NewSaved(filepath.Join(t.TempDir(), "c.toml"), "")
	must.Do(t, errors.Join(saved.Save("p/a", policy.Policy{"wait_time": "1ms"}, 5), saved.Apply(&cfg)))
	if s := cfg.Models[0].Stages[0]; s.Policy["wait_time"] != "1ms" || s.Workers[0].Instances != 5 {
		t.Errorf("%+v", s)
	}
}

// signatures are those of a pipeline and its last stage.
func signatures(m *broker.ModelConfig) string {
	return m.Signature.String() + "; " + m.Stages[len(m.Stages)-1].Signature.String()
}

func TestMemoryIsTheDefaultOfAllTensors(t *testing.T) {
	cfg, err := Parse("[[model]]\nname = \"m\"\ninputs = [\"x:f32[4]\", \"n:i32[<=3]@host\"]\noutputs = [\"y:f32[2]@device:1\"]\n" +
		"memory = \"device:1\"\n")
	if err != nil || cfg.Models[0].Signature.String() != "x:f32[4]@device:1 n:i32[<=3] -> y:f32[2]@device:1" {
		t.Errorf("%+v, %v", cfg.Models, err)
	}
	onDevice := strings.NewReplacer("f32[<=8]", "f32[8]", "ragged = true", "memory = \"device\"", "y:f32[<=3]", "y:f32[3]@host")
	cfg, err = Parse(onDevice.Replace(plainPipeline))
	const want = "x:f32[8]@device:0 z:f32[2]@device:0 -> y:f32[3]; h:f32[4]@device:0 z:f32[2]@device:0 -> y:f32[3]"
	if err != nil || signatures(&cfg.Models[0]) != want {
		t.Errorf("%+v, %v", cfg.Models, err)
	}
	for _, wrong := range []string{"memory = \"gpu\"", "memory = \"device:64\"", "memory = \"device:0\"\nprivate = true"} {
		cfg, err := Parse("[[model]]\nname = \"m\"\ninputs = [\"x:f32[4]\"]\noutputs = [\"y:f32[2]\"]\n" + wrong + "\n")
		if err == nil {
			err = cfg.Models[0].Check()
		}
		if !errors.Is(err, status.ErrInvalid) {
			t.Errorf("%s: %v", wrong, err)
		}
	}
}

func TestAPipelineThatDoesNotFitTogetherIsRefusedWithWhatIsWrong(t *testing.T) {
	for _, c := range []struct{ from, to, says string }{
		{`["h", "z"]`, `["g", "z"]`, `no tensor "g" here; there are x, z, h`},
		{`["h", "z"]`, `["g:f32[1]"]`, "neither an input of the pipeline nor written"},
		{`["h", "z"]`, `["h:f32[5]"]`, "which is h:f32[4]"},
		{`["y:f32[<=3]"]`, `["h:f32[4]"]`, "there before it"},
		{`["h:f32[4]"]`, `["h:f32[<=4]"]`, "variable dimension"},
		{`name = "b"`, `name = "a"`, "two of this name"},
		{`name = "b"`, `name = "a/b"`, "has no /"},
		{"max_batch_size = 4", "slots = 4", "whole pipeline"},
		{"max_batch_size = 4", "max_queue = { 1 = 3 }", "priority level"},
		{"instances = 2", "wait_time = 2", "unknown key"},
		{"wait_time = \"3ms\"", "outputs = [\"h\"]", "must be among the outputs"},
		{"wait_time = \"3ms\"", "outputs = [\"y:f32[4]\"]", "no stage writes"},
		{"[[model.stage]]\nname = \"a\"", "[[model.worker]]\ncommand = [\"w\"]\n[[model.stage]]\nname = \"a\"", "belong to its stages"},
	} {
		text := strings.Replace(plainPipeline, c.from, c.to, 1)
		if _, err := Parse(text); !errors.Is(err, status.ErrInvalid) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", c.to, err)
		}
	}
}
