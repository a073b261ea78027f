// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/tools/load"
)

// parse runs the flags as main does, without running anything.
func parse(args ...string) (*options, error) {
	var o options
	f := o.flags()
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	return &o, o.check(f)
}

func TestGoodFlagsAreAccepted(t *testing.T) {
	for _, line := range []string{
		"",
		"--worker_num=64 --max_batch_size=32 --model_num=1 --wait_time=0.005",
		"--model_type=echo --data_type=uint8 --input_shape=3,224,224 --worker_num=2",
		"--rate=100 --wait_time=10ms",
		"--no_dynamic_batch --worker_num=2",
		"--demo",
	} {
		if _, err := parse(strings.Fields(line)...); err != nil {
			t.Errorf("%q: %v", line, err)
		}
	}
}

func TestBadFlagsAreRefusedWithTheReason(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "missing.pt2")
	for line, reason := range map[string]string{
		"--worker_num=0":                             "--worker_num is 0, must be 1..",
		"--worker_num=-3":                            "--worker_num is -3",
		"--worker_num=100000":                        "must be 1..4096",
		"--max_batch_size=0":                         "--max_batch_size is 0, must be 1..",
		"--max_batch_size=1000000":                   "--max_batch_size is 1000000, must be 1..16384",
		"--worker_batch=33":                          "--worker_batch is 33, must be 1..32",
		"--worker_batch=0":                           "--worker_batch is 0",
		"--model_num=0":                              "--model_num is 0",
		"--in_flight=-1":                             "--in_flight is -1",
		"--wait_time=-1":                             "--wait_time is -1s, must be 0..",
		"--wait_time=soon":                           "want seconds as a number",
		"--duration=0.001":                           "--duration is 1ms, must be at least",
		"--warmup=-1":                                "--warmup is -1s",
		"--rate=-5":                                  "--rate is -5",
		"--rate=NaN":                                 "--rate is NaN",
		"--rate=5 --no_dynamic_batch":                "--rate needs the broker",
		"--stability=0":                              "--stability is 0",
		"--max_windows=2":                            "--max_windows is 2, must be 3..",
		"--model_type=resnet":                        "no model \"resnet\"; there are affine,",
		"--model_type=echo --model_path=x":           "echo has no model file",
		"--model_type=torch --model_path=" + missing: "no such file",
		"--data_type=f64":                            "mlp takes f32, got \"f64\"",
		"--data_type=complex":                        "mlp takes f32",
		"--model_type=echo --input_shape=0":          "must be at least 1",
		"--in_flight=65536 --worker_num=4096 --worker_batch=32": "must be",
		"--demo --worker_batch=2":                               "chooses it itself",
		"--json=" + missing + "/r.json":                         "cannot be written: no such file",
		"--json=" + t.TempDir():                                 "cannot be written: is a directory",
		"--demo --rate=5":                                       "chooses it itself",
		"--unknown":                                             "unknown flag",
	} {
		_, err := parse(strings.Fields(line)...)
		if err == nil {
			t.Errorf("%q was accepted", line)
		} else if !strings.Contains(err.Error(), reason) {
			t.Errorf("%q: %q does not say %q", line, err, reason)
		}
	}
}

func TestASimulatedModelSaysSoEverywhere(t *testing.T) {
	o, err := parse("--model_type=simulated")
	must.Do(t, err)
	r := &load.Result{Config: &o.cfg.Config, Note: o.cfg.note(), Stable: true}
	var table strings.Builder
	r.Print(&table)
	for where, text := range map[string]string{"table": table.String(), "note": r.Note} {
		if !strings.Contains(text, "simulated") {
			t.Errorf("the %s does not say that it is simulated: %q", where, text)
		}
	}
}

func TestFlagsAreTakenWithDashesAndWithUnderscores(t *testing.T) {
	for _, flag := range []string{"--wait_time=1ms", "--wait-time=1ms"} {
		var o options
		if err := o.flags().Parse([]string{flag}); err != nil || o.cfg.WaitTime.D() != time.Millisecond {
			t.Errorf("%s: %v, %v", flag, err, o.cfg.WaitTime)
		}
	}
}
