// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/tools/load"
)

func TestTheDemoPrintsRoundNumbersAndOneSentence(t *testing.T) {
	line := func(name string, rate, latency, batch float64) demoLine {
		r := &load.Result{ItemsPerS: rate, RatioToBound: 0.957}
		r.Latency.Avg, r.BatchSize.Avg = latency, batch
		return demoLine{name, r}
	}
	d := &demoReport{Config: &load.Config{WorkerNum: 32}, Lines: []demoLine{
		line("one process alone", 179.4, 5.574, 1), line("32 processes, each on its own", 256.2, 124.9, 1),
		line("32 processes through ringbatch", 2057.3, 15.53, 25.6),
	}}
	d.Lines[2].OtherCPU = 40
	var out strings.Builder
	d.Print(&out)
	for _, want := range []string{
		"one process alone                           180       5.6 ms\n",
		"32 processes through ringbatch            2,100        16 ms   in batches of 26\n",
		"Batched, the same 32 processes did 8 times the work at 1/8 of the latency: 96 % of what the model can do.\n",
		"Other programs used up to 40 % of this machine meanwhile.\n",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the demo does not print %q, but:\n%s", want, &out)
		}
	}
	if n := strings.Count(out.String(), "\n"); n > 8 {
		t.Errorf("the demo prints %d lines:\n%s", n, &out)
	}
}

func TestADemoThatWasInterruptedPrintsWhatItHas(t *testing.T) {
	d := &demoReport{Config: &load.Config{WorkerNum: 32}, Lines: []demoLine{{"one process alone", &load.Result{}}}}
	var out strings.Builder
	d.Print(&out)
	if strings.Contains(out.String(), "times the work") {
		t.Errorf("it compares what it did not measure:\n%s", &out)
	}
}
