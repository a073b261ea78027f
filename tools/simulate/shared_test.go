// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/ringbatch/ringbatch/internal/must"
)

func runShares(t *testing.T, flags ...string) *SharedResult {
	t.Helper()
	set := pflag.NewFlagSet("", pflag.ContinueOnError)
	c := NewCommand(set)
	must.Do(t, set.Parse(append(flags, "--gpu-memory", "10")))
	r, err := c.runShared(t.Context())
	must.Do(t, err)
	return r
}

func TestTwoModelsThatDoNotFitTakeTurns(t *testing.T) {
	for seed := range 20 {
		r := runShares(t, "--share", "a,memory=6,start=8s,rate=5,on=20s,off=40s,idle=10s", "--share",
			"b,memory=6,start=2s,rate=5,on=20s,off=40s,idle=10s", "--length", "20m", "--seed", strconv.Itoa(seed))
		for _, m := range r.Models {
			// A turn of the other one, of four starts, and the starts of both.
			if most := 4*8*time.Second + 3*10*time.Second; m.Wakes < 3 || m.Awake > 0.9 || m.Unanswered > 5*62 || m.Latency.Max > most {
				t.Errorf("seed %d: %+v", seed, m)
			}
		}
		if r.Held != 6 {
			t.Errorf("seed %d: %v GiB held", seed, r.Held)
		}
	}
}

func TestASharedGPUIsNeverOverItsBudget(t *testing.T) {
	for seed := range 5 {
		var flags []string
		for i := range 20 {
			flags = append(flags, "--share", "m"+strconv.Itoa(i)+",memory="+strconv.Itoa(1+i%3)+",start=3s,rate=10,takes=50ms,on=10s,off=30s,idle=20s,instances="+
				strconv.Itoa(i%2)+"-"+strconv.Itoa(1+i%3))
		}
		r := runShares(t, append(flags, "--length", "20m", "--seed", strconv.Itoa(seed))...)
		if r.Held > 10 {
			t.Errorf("seed %d: %v GiB held", seed, r.Held)
		}
		for _, m := range r.Models {
			if m.Wakes == 0 || m.Requests-m.Unanswered < 1000 {
				t.Errorf("seed %d starves %+v", seed, m)
			}
		}
	}
}

func TestAStepOfTheLoadIsFollowedOnce(t *testing.T) {
	m := runShares(t, "--share", "m,memory=1,start=3s,takes=20ms,rate=120,goal=200ms,instances=1-8", "--length", "30m").Models[0]
	if m.Workers < 3 || m.Up > 4 || m.Down > 4 || m.Latency.P99 > 200*time.Millisecond {
		t.Errorf("%+v", m)
	}
}

func TestABadShareIsRefusedWithTheReason(t *testing.T) {
	for text, why := range map[string]string{
		"a,memory=0": "positive", "memory=6": "begin with a name", "a,instances=3-1": "0-4", "a,memory=99": "--gpu-memory", "a,takes=5": "takes", "a,x=1": "no \"x\"",
		"a,start=2m": "less than 2m",
		"a,rate=NaN": "rate", "a,rate=1000,off=0s,on=1s,memory=1,takes=1ms,instances=1-9999": "instances",
	} {
		if _, err := command(t, "--share", text); err == nil || !strings.Contains(err.Error(), why) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

func TestFlagsThatDoNotCountAreRefused(t *testing.T) {
	for _, flags := range [][]string{{"--share", "a", "--rate", "9"}, {"--cost", "1=1ms", "--gpu-memory", "3"},
		{"--share", "a", "--gpu-memory", "Inf"}} {
		if _, err := command(t, flags...); err == nil || !strings.Contains(err.Error(), "--share") {
			t.Errorf("%v: %v", flags, err)
		}
	}
}
