// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/spf13/pflag"
)

// command runs the command, and returns its output.
func command(t *testing.T, args ...string) (stdout string, err error) {
	t.Helper()
	set := pflag.NewFlagSet("simulate", pflag.ContinueOnError)
	c := NewCommand(set)
	must.Do(t, set.Parse(args))
	var out strings.Builder
	err = c.Run(t.Context(), &out)
	return out.String(), err
}

func TestTheCommandPrintsAReportThatAPersonCanRead(t *testing.T) {
	out, err := command(t, strings.Fields("--requests 5000 --rate 3000 --wait-time 2ms --priority share=1 --priority share=9")...)
	must.Do(t, err)
	for _, want := range []string{
		"Poisson arrivals, 3000 requests/s", "max_batch_size 32, wait_time 2ms, 2 levels", "throughput", "p99.9", "level 1",
		"5,000 completed", "% wait time over", "% busy", "seed 1",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("does not say %q:\n%s", want, out)
		}
	}
}

func TestTheCommandWritesJSON(t *testing.T) {
	out, err := command(t, "--arrivals", "closed", "--clients", "40", "--requests", "4000", "--json")
	must.Do(t, err)
	var r struct {
		Outcomes Outcomes           `json:"outcomes"`
		Latency  map[string]float64 `json:"latency_ms"`
		Sizes    []SizeCount        `json:"batch_sizes"`
	}
	must.Do(t, json.Unmarshal([]byte(out), &r))
	if r.Outcomes.Completed != 4000 || r.Latency["p99.9"] <= 0 || len(r.Sizes) == 0 {
		t.Errorf("%+v", r)
	}
}

func TestTheCommandTakesMeasuredCosts(t *testing.T) {
	costs := filepath.Join(t.TempDir(), "costs.csv")
	must.Do(t, os.WriteFile(costs, []byte("rows,seconds\n1,0.003\n8,0.003\n"), 0o600))
	out, err := command(t, "--arrivals=closed", "--clients=8", "--requests=16", "--cost", costs, "--max-batch-size", "8", "--hop", "0")
	must.Do(t, err)
	for _, want := range []string{"closed loop, 8 clients", "over 6ms", "2 of 8.0 rows on average, 100.0 % full"} {
		if !strings.Contains(out, want) {
			t.Errorf("does not say %q:\n%s", want, out)
		}
	}
}

func TestEveryExampleOfTheHelpRuns(t *testing.T) {
	text := strings.ReplaceAll(Examples, "\\\n", " ")
	ran := 0
	for _, line := range strings.Split(text, "\n") {
		args, found := strings.CutPrefix(strings.TrimSpace(line), "ringbatch simulate ")
		if !found || strings.Contains(line, "simulate resnet50") { // it needs a model
			continue
		}
		less := []string{"--requests", "2000"}
		if strings.Contains(args, "--share") {
			less = []string{"--length", "1m"}
		}
		if _, err := command(t, append(strings.Fields(args), less...)...); err != nil {
			t.Errorf("%s: %v", args, err)
		}
		ran++
	}
	if ran < 4 {
		t.Errorf("found %d examples", ran)
	}
}

func TestABadFlagIsNamed(t *testing.T) {
	for args, want := range map[string]string{
		"--rate -1":            "rate is -1 requests per second, must be more than 0",
		"--rate 1e12":          "at most 1e9",
		"--arrivals sometimes": `--arrivals is "sometimes", must be poisson, bursty or closed`,
		"--rows 0":             `--rows is "0", must be a number or a range like 1-4`,
		"--rows 4-x":           `--rows is "4-x"`,
		"--tokens 0-8":         `--tokens is "0-8", must be a number or a range like 8-500`,
		"--tokens 9-8":         "tokens per request are 9 to 8, must be ascending",
		"--rows 40":            "requests have up to 40 rows, max_batch_size is 32",
		"--cost 1=1ms,2":       `cost point "2" is not like 32=8.2ms`,
		"--pad 8":              `--pad is "8", must be preferred, or rows of at least --max-batch-size`,
		"--priority x=1":       `unknown key "x"`,
		"--priority share=1 --priority default_timeout=1s": "give a share= to every level or to none",
		"--priority share=-1":                              "a share is a number, at least 0",
		"--priority on_timeout=wait":                       "on_timeout.0=wait: must be reject or delay",
		"--workers 0":                                      "must be at least 1",
		"--max-batch-size 0":                               "max_batch_size=0: must be a number, 1..1048576",
		"--preferred-batch-sizes 8,4":                      "preferred_batch_sizes are [8 4], must ascend",
		"--default-priority 1":                             "default_priority is 1, must be 0..0",
		"--requests 0":                                     "requests is 0, must be 1..1000000000",
		"--rate 1e-9":                                      "it takes more than 36 years",
		"--rate 1e-300":                                    "it takes more than 36 years",
		"--cost 1=1h --workers 2 --sharing 1000 --shapes 1000 --depth 10": "it takes more than 36 years",
		"--hop 100000h":                               "hop is 100000h0m0s, must be 0..24h0m0s",
		"--deadline 2562047h":                         "deadline is 2562047h0m0s, must be 0..24h0m0s",
		"--cost 1=100h":                               "the cost of 1 rows is 100h0m0s, must be above 0 and at most 1h0m0s",
		"--pad 9999999":                               "padded to 9999999 rows",
		"--sharing nan":                               "sharing is NaN, must be 0..1000",
		"--sharing inf":                               "sharing is +Inf, must be 0..1000",
		"--priority share=inf":                        "add up to +Inf",
		"--arrivals closed --think 2562047h":          "think time is 2562047h0m0s, must be 0..24h0m0s",
		"--arrivals bursty --off 2562047h":            "must be at most 24h0m0s",
		"--arrivals bursty --on 1ns --off 0 --rate 1": "a burst of 1ns has 1e-09 requests on average",
	} {
		out, err := command(t, strings.Fields(args)...)
		if !errors.Is(err, status.ErrInvalid) || out != "" || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
}

func TestAFileThatCannotBeUsedIsNamed(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "missing", "file")
	if _, err := command(t, "--cost", missing); err == nil || errors.Is(err, status.ErrInvalid) || !strings.Contains(err.Error(), "--cost: ") {
		t.Error(err)
	}
}

func TestSeveralWorkersAndBatchSizesAreCompared(t *testing.T) {
	args := "--requests 4000 --cost 1=3.3ms,32=8.2ms --workers 1,2,4 --batch-sizes 1,8,32"
	for load, want := range map[string]string{
		"--rate 400 --wait-time 0":        "best: instances = 1, max_batch_size = 8", // 303/s in batches of 1
		"--rate 3000 --latency-goal 50ms": "best: instances = 1, max_batch_size = 32",
		"--rate 6000":                     "best: instances = 2, max_batch_size = 32",
		"--rate 40000":                    "No choice carries this load. Try more --workers.",
		"--rate 400 --latency-goal 1ms":   "No choice carries this load with a p99 of at most 1ms",
		"--arrivals closed --clients 128": "best: instances = 4, max_batch_size = 32",
	} {
		out, err := command(t, strings.Fields(args+" "+load)...)
		if err != nil || !strings.Contains(out, want) {
			t.Errorf("%s: %v, want %q in\n%s", load, err, want, out)
		}
	}
	out, err := command(t, strings.Fields(args+" --rate 6000 --json")...)
	var found struct {
		Best    struct{ Workers int }
		Choices []struct{}
	}
	if must.Do(t, err); json.Unmarshal([]byte(out), &found) != nil || found.Best.Workers != 2 || len(found.Choices) != 9 {
		t.Errorf("%s", out)
	}
}
