// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
)

// withMemory is a configuration with a budget of 10 GiB. nvidia-smi lists what the workers write into a file.
func withMemory(t *testing.T, models string) string {
	bin := t.TempDir()
	apps := filepath.Join(bin, "apps")
	must.Do(t, os.WriteFile(apps, nil, 0o600))
	must.Do(t, os.WriteFile(filepath.Join(bin, "nvidia-smi"), fmt.Appendf(nil, "#!/bin/sh\ncase \"$*\" in *pid,used_memory*) cat %s;; esac\n", apps), 0o700))
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	return strings.ReplaceAll("[[gpu]]\nnumber = 0\nmemory = \"10GiB\"\n"+models, "APPS", apps)
}

// taking is a sleeper whose worker takes so many MiB of GPU 0, and does not declare it.
func taking(name string, scale, mib int) string {
	return first(sleeper(name, scale, "", "gpus = [0]"), fmt.Sprintf("echo $$, %d >> APPS", mib))
}

func (c *cli) holds(model string) int64 {
	for _, m := range c.staffing(model).Memory {
		if m.GPU == 0 && m.Held {
			return m.Bytes >> 20
		}
	}
	return 0
}

func TestMemoryThatIsNotDeclaredIsMeasured(t *testing.T) {
	c := startCLIWith(t, withMemory(t, taking("a", 1, 6000)+taking("b", 2, 4000)+taking("c", 3, 5000)))
	ask := func(model string, scale int) {
		t.Helper()
		if y, err := askFor(t.Context(), c.dial(model), patience); y != scale || err != nil {
			t.Errorf("%s: %d, %v", model, y, err)
		}
	}
	c.until("the first one's memory is known", func() bool { return c.holds("a") == 6000 })
	ask("b", 2)
	if s := c.staffing("a"); s.Sleeps != 1 {
		t.Errorf("a stayed beside one whose memory was not known: %+v", s)
	}
	c.until("the second one's memory is known", func() bool { return c.holds("b") == 4000 })
	ask("a", 1)
	c.until("both fit", func() bool { return c.holds("a") == 6000 && c.holds("b") == 4000 })
	ask("c", 3)
	c.until("the third one's memory is known", func() bool { return c.holds("c") == 5000 })
	ask("a", 1)
	if a, c := c.staffing("a"), c.staffing("c"); a.State != "awake" || c.State == "awake" {
		t.Errorf("11000 MiB are awake: %+v, %+v", a, c)
	}
}

func TestAWorkerThatLoadsDoesNotKeepOthersFromBeingMeasured(t *testing.T) {
	one := filepath.Join(t.TempDir(), "one")
	c := startCLIWith(t, withMemory(t, first(sleeper("a", 1, "", "gpus = [0]\ninstances = 2"),
		"mkdir "+one+" || exec sleep 1000; echo $$, 3000 >> APPS")))
	c.until("the memory of two is known", func() bool { return c.holds("a") == 6000 })
	if log := c.broker.Log(); strings.Contains(log, "cannot be measured") {
		t.Error(log)
	}
}

func TestAModelWhoseMemoryCannotBeMeasuredHasTheGPUAlone(t *testing.T) {
	c := startCLIWith(t, withMemory(t, sleeper("hidden", 1, "", "gpus = [0]")+sleeper("known", 2, "", "gpus = [0]\nmemory = \"1GiB\"")))
	c.until("the log says so", func() bool { return strings.Contains(c.broker.Log(), "lists no memory of hidden-0") })
	if c.holds("hidden") != 10<<10 || c.staffing("known").State != "asleep" {
		t.Errorf("%+v, %+v", c.staffing("hidden"), c.staffing("known"))
	}
}
