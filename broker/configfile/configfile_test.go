// SPDX-License-Identifier: Apache-2.0

package configfile

import (
	"errors"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
)

const plainModel = "[[model]]\nname = \"m\"\ninputs = [\"x:f32[4]\"]\noutputs = [\"y:f32[4]\"]\n"

func TestAZeroThatIsWrittenDownIsNotTakenForTheDefault(t *testing.T) {
	cfg, err := Parse("drain_time = 0\n" + plainModel + "wait_time = 0\n")
	must.Do(t, err)
	if cfg.DrainTime >= 0 || cfg.Models[0].Policy["wait_time"] != "0" {
		t.Errorf("%v, %v", cfg.DrainTime, cfg.Models[0].Policy)
	}
	if _, err := Parse(plainModel + "lease = 0\n"); !errors.Is(err, status.ErrInvalid) {
		t.Errorf("lease = 0: %v", err)
	}
}

func TestADurationIsANumber(t *testing.T) {
	for _, key := range []string{"wait_time", "lease", "ageing"} {
		for _, value := range []string{"nan", "-nan", "inf", "-1", "true", "[1]", "\"soon\""} {
			if _, err := Parse(plainModel + key + " = " + value + "\n"); !errors.Is(err, status.ErrInvalid) {
				t.Errorf("%s = %s: %v", key, value, err)
			}
		}
	}
}

func TestACountIsOneOrMore(t *testing.T) {
	worker := plainModel + "[[model.worker]]\ncommand = [\"w\"]\n"
	if _, err := Parse(worker + "spares = 0\n"); err != nil {
		t.Errorf("spares = 0, which is none: %v", err)
	}
	for _, text := range []string{
		"max_clients = 0\n" + plainModel, "loops = 0\n" + plainModel, plainModel + "slots = 0\n",
		plainModel + "max_batch_size = 0\n", plainModel + "max_batch_size = 1.5\n", worker + "instances = 0\n",
		worker + "spares = -1\n", worker + "spares = 1.5\n", worker + "spares = 99999999999\n",
	} {
		if _, err := Parse(text); !errors.Is(err, status.ErrInvalid) {
			t.Errorf("%s\n%v", text, err)
		}
	}
}

func TestWorkerTablesAreRead(t *testing.T) {
	cfg, err := Parse(`
mps = true
[[worker]]
command = ["own"]
[[model]]
name = "m"
inputs = ["x:f32[4]"]
outputs = ["y:f32[4]"]
[[model.worker]]
command = ["a", "b"]
instances = 3
gpus = [0, 1]
env = { K = "v" }
thread_percentage = 33
stop_time = "2s"
`)
	must.Do(t, err)
	w := cfg.Models[0].Workers[0]
	if !cfg.MPS || len(cfg.Workers) != 1 || w.Command[1] != "b" || w.Instances != 3 || w.GPUs[1] != 1 || w.Env["K"] != "v" ||
		w.ThreadPercentage != 33 || w.StopTime != 2*time.Second {
		t.Errorf("%+v", cfg)
	}
	for _, bad := range []string{
		"command = []", "instances = -1", "thread_percentage = 101", "gpus = [-1]",
		"thread_percentage = 0", "stop_time = 0", // 0 would pass as the default
		`env = { "A=B" = "c" }`,
	} {
		command := "command = [\"a\"]\n"
		if strings.HasPrefix(bad, "command") {
			command = ""
		}
		if _, err := Parse("[[worker]]\n" + command + bad); err == nil {
			t.Errorf("accepted %q", bad)
		}
	}
}

func TestAnUnknownKeyIsRefusedWithThoseOfItsTable(t *testing.T) {
	stage := "[[model]]\nname = \"p\"\ninputs = [\"x:f32[4]\"]\noutputs = [\"y:f32[4]\"]\n[[model.stage]]\nname = \"s\"\n"
	for text, says := range map[string]string{
		staffed(`idel = "5s"`, ""):           `model "m": invalid value: unknown key "idel"; known are ageing, .*, idle, inputs, keep, .*, memory, .*, worker$`,
		staffed(`idles = "5s"`, ""):          `"idles" \(did you mean idle\?\); known`,
		staffed("", "instance = 2"):          `unknown key "instance" \(did you mean instances\?\); known are command, .*, stop_time, thread_percentage$`,
		staffed("", "a.b = 2"):               `unknown key "a"; known are command`,
		"sockets = \"x\"":                    `unknown key "sockets" \(did you mean socket\?\); known are alias, .*, worker$`,
		"[[gpu]]\nmem = 2":                   `unknown key "mem"; known are memory, number$`,
		"[[allow]]\nuser = [1]":              `unknown key "user" \(did you mean users\?\); known are groups, may, users$`,
		stage + "idle = \"5s\"\n":            `stage "s": invalid value: unknown key "idle"; known are .* wait_time, worker$`,
		stage + "wait_tme = \"5s\"\n":        `unknown key "wait_tme" \(did you mean wait_time\?\)`,
		staffed("[model.bucket]\nx = 1", ""): `unknown key "bucket" \(did you mean buckets\?\)`,
	} {
		if _, err := Parse(text); !errors.Is(err, status.ErrInvalid) || !regexp.MustCompile(says).MatchString(err.Error()) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

func TestAListThatIsWrittenAsATableIsNamed(t *testing.T) {
	_, err := Parse("[model.resnet]\ninputs = [\"x:f32[4]\"]\n")
	if !errors.Is(err, status.ErrInvalid) || !strings.Contains(err.Error(), "[[model]]") {
		t.Errorf("a list as a table: %v", err)
	}
}

func TestAGatewayIsAProcessWithTheFlagsOfItsTable(t *testing.T) {
	cfg, err := Parse("[gateway]\nhttp = 8000\ngrpc = \"off\"\nsystem_shared_memory = true\nmodel = [\"a\", \"b\"]\n")
	must.Do(t, err)
	const want = "gateway --grpc=off --http=8000 --model=a --model=b --system-shared-memory=true"
	if w := cfg.Workers[0]; strings.Join(w.Command[1:], " ") != want || !w.Client || w.Name != Gateway {
		t.Errorf("%+v", w)
	}
	cfg, err = Parse("[gateway]\ndrain_delay = \"7s\"\n")
	if err != nil || cfg.Workers[0].StopTime != 47*time.Second { // 30 s to finish, and 10
		t.Errorf("%v, %v", cfg.Workers, err)
	}
	if cfg, err = Parse("[gateway]\n"); err != nil || len(cfg.Workers) != 1 { // both doors, where they usually are
		t.Errorf("%+v, %v", cfg.Workers, err)
	}
	if cfg, err = Parse(plainModel); err != nil || len(cfg.Workers) != 0 {
		t.Errorf("%+v, %v", cfg.Workers, err)
	}
	if _, err := Parse("[gateway]\nhttp = { port = 1 }\n"); !errors.Is(err, status.ErrInvalid) {
		t.Error(err)
	}
}

func TestSleepAndRoomAreRead(t *testing.T) {
	cfg, err := Parse(staffed("idle = \"10m\"\nkeep = false", "instances = [0, 4]\ngpus = [0]\nmemory = \"1.5GiB\"\n[[gpu]]\nnumber = 0\nmemory = \"6GiB\""))
	must.Do(t, err)
	m, w := cfg.Models[0], cfg.Models[0].Workers[0]
	if m.Idle != 10*time.Minute || m.Keep || w.Least != 0 || w.Most != 4 || w.Instances != 1 || w.Memory != 3<<29 || cfg.GPUMemory[0] != 6<<30 {
		t.Errorf("%+v, %+v", cfg.Models[0], cfg.GPUMemory)
	}
	for _, bad := range []struct{ model, worker, says string }{
		{"idle = 0", "", "positive"}, {"", "instances = [3, 1]", "the least and the most"}, {"", "instances = []", "the least and the most"},
		{"", "memory = \"6GB\"", "6GiB"}, {"", "memory = \"6GiB\"", "name the GPU"}, {"", "[[gpu]]\nnumber = 0", "memory"},
		{"", "[[gpu]]\nnumber = 0\nmemory = 1\n[[gpu]]\nnumber = 0\nmemory = 1", "its own number"},
		{"", "[[gpu]]\nmemory = 1", "its own number"},
	} {
		if _, err := Parse(staffed(bad.model, bad.worker)); err == nil || !strings.Contains(err.Error(), bad.says) {
			t.Errorf("%q, %q: %v", bad.model, bad.worker, err)
		}
	}
	for _, bad := range []struct{ model, worker, says string }{
		{"", "instances = [0, 4]", "idle"}, {"idle = \"1m\"\nkeep = true", "", "contradict"}, {"idle = \"5ms\"", "", "1s or more"}, {"memory = \"device:0\"\nidle = \"1m\"", "", "cannot sleep"},
		{"keep = true", "gpus = [0]\n[[gpu]]\nnumber = 0\nmemory = \"6GiB\"", "say how much memory"},
		{"", "gpus = [0]\nmemory = \"7GiB\"\n[[gpu]]\nnumber = 0\nmemory = \"6GiB\"", "budget"},
		{"", "instances = [1, 2]\n[[model.worker]]\ncommand = [\"x\"]", "several kinds"},
	} {
		cfg, err := Parse(staffed(bad.model, bad.worker))
		must.Do(t, err)
		cfg.Socket = filepath.Join(t.TempDir(), "s", "b.sock")
		if _, err := broker.New(cfg); err == nil || !strings.Contains(err.Error(), bad.says) {
			t.Errorf("%q, %q: %v", bad.model, bad.worker, err)
		}
	}
}

func staffed(model, worker string) string {
	return "[[model]]\nname = \"m\"\ninputs = [\"x:f32[4]\"]\noutputs = [\"y:f32[4]\"]\n" + model + "\n[[model.worker]]\ncommand = [\"x\"]\n" + worker
}
