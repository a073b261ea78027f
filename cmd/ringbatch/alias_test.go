// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/tensor"
)

// version is a model whose worker multiplies by its scale.
func (c *cli) version(name string, scale, width int) string {
	return fmt.Sprintf(`
[[model]]
name = %q
inputs = ["x:f32[%d]"]
outputs = ["y:f32[%[2]d]"]
wait_time = 0
[[model.worker]]
command = [%q, "worker", "affine", "--name", %[1]q, "--scale", "%[4]d", "--input", "x:f32[%[2]d]"]
`, name, width, c.bin, scale)
}

// serveVersions has the broker serve m@1 and m@2, and m@wide of another
// signature.
func (c *cli) serveVersions(aliases string) {
	c.t.Helper()
	c.reload(aliases + c.version("m@1", 1, 4) + c.version("m@2", 2, 4) + c.version("m@wide", 3, 8))
	c.must("ready", "m@1", "m@2", "m@wide", "--wait", "1m")
}

// must runs a command that ends well.
func (c *cli) must(args ...string) string {
	c.t.Helper()
	out, code := c.run(args...)
	if code != 0 {
		c.t.Fatalf("ringbatch %s: status %d\n%s", strings.Join(args, " "), code, out)
	}
	return out
}

// alias changes one. A version whose worker stands still, with the machine, is not
// ready and refused until it goes on.
func (c *cli) alias(args ...string) {
	c.t.Helper()
	out, code := "", 0
	c.until("the alias is changed", func() bool {
		out, code = c.run(append([]string{"alias"}, args...)...)
		return code == 0 || !strings.Contains(out, "is not ready")
	})
	if code != 0 {
		c.t.Fatalf("ringbatch alias %s: status %d\n%s", strings.Join(args, " "), code, out)
	}
}

// client/alias_test.go, gateway/core and python/tests have the load that loses no request.
func TestAClientOnTheRingFollowsAnAlias(t *testing.T) {
	c := startCLI(t)
	c.serveVersions("[alias]\nm = \"m@1\"\n")
	cl, err := client.Dial(t.Context(), "m")
	must.Do(t, err)
	defer cl.Close()
	answeredBy := func(scale float32) {
		t.Helper()
		c.until(fmt.Sprint("version ", scale, " answers"), func() bool {
			outs, err := cl.Infer(t.Context(), []float32{1, 1, 1, 1, 1, 1, 1, 1}) // two rows, or one of m@wide
			must.Do(t, err)
			y, _ := tensor.As[float32](outs[0])
			return y[7] == scale
		})
	}
	answeredBy(1)
	c.alias("m", "m@2")
	answeredBy(2)
	c.alias("m", "m@wide") // the inputs fit this signature, too
	answeredBy(3)
	// Shares are a gateway's: clients on the ring have the model with the largest that has a worker.
	w := c.start("worker", "affine", "--name", "m@4", "--scale", "4", "--input", "x:f32[4]")
	c.must("ready", "m@4", "--wait", "1m")
	c.alias("m", "m@1=40", "m@4=60")
	answeredBy(4)
	c.ends(w)
	c.until("it has left", func() bool { return c.stats().Aliases[0].To[1].Clients == 0 })
	w = c.start("worker", "affine", "--name", "m@4", "--scale", "4", "--input", "x:f32[4]")
	answeredBy(4)
	c.ends(w)
}

func TestAnAliasThatCannotBeIsRefusedAndOneThatIsSavedSurvives(t *testing.T) {
	c := startCLI(t)
	c.serveVersions("[alias]\nm = \"m@1\"\nother = { \"m@1\" = 90, \"m@2\" = 10 }\n")
	for _, bad := range []struct {
		args string
		code int
		says string
	}{
		{"alias m m@7", 1, "no such model"},
		{"alias m m@7 --force", 1, "no such model"},
		{"alias m m", 2, "cannot stand for itself"},
		{"alias n m --force", 1, "is an alias"},
		{"alias m@1 m@2", 1, "there is a model of that name"},
		{"alias m@1 --remove", 1, "no alias"},
		{"alias nobody", 1, "no alias"},
		{"alias m m@1 --remove", 2, "one alias"},
		{"set m wait_time=1ms", 1, "is an alias of m@1"},
		{"worker affine --name m --input x:f32[4]", 1, "is an alias"},
	} {
		if out, code := c.run(strings.Fields(bad.args)...); code != bad.code || !strings.Contains(out, bad.says) {
			t.Errorf("ringbatch %s: status %d, want %d and %q\n%s", bad.args, code, bad.code, bad.says, out)
		}
	}
	c.alias("m", "m@2", "--save")
	c.alias("other", "--remove", "--save")
	c.alias("third", "m@1=25", "m@2=75", "--save")
	c.alias("unsaved", "m@1")
	c.ends(c.broker)
	c.broker = c.start("broker", "--config", c.config, "--log-level", "warn")
	c.until("it is up again", func() bool { _, code := c.run("ready", "m", "third"); return code == 0 })
	out := strings.Join(strings.Fields(c.must("alias")), " ")
	if out != "alias model share clients m m@2 100 % 0 third m@1 25 % 0 third m@2 75 % 0" {
		text, _ := os.ReadFile(c.config + ".saved")
		t.Errorf("after the restart: %s\n%s", out, text)
	}
	if out := c.must("stats", "m"); !strings.Contains(out, "alias m") || !strings.Contains(out, "m@2  100 %") {
		t.Errorf("stats: %s", out)
	}
}

func TestMetricsAndTheRepositoryIndexShowAnAlias(t *testing.T) {
	c := startCLI(t)
	c.serveVersions("[alias]\nm = { \"m@1\" = 75, \"m@2\" = 25 }\n")
	base := c.gateway()
	text, _ := get(t, base+"/metrics")
	for name, share := range map[string]float64{"m@1": 0.75, "m@2": 0.25} {
		if got := value(t, text, fmt.Sprintf("ringbatch_alias_share_ratio{alias=\"m\",model=%q}", name)); got != share {
			t.Errorf("the share of %s is %v", name, got)
		}
	}
	checkMetrics(t, text)
	c.alias("m", "m@2")
	c.until("the index has one version", func() bool { // the gateway hears of it
		rep, err := http.Post(base+"/v2/repository/index", "application/json", nil)
		must.Do(t, err)
		defer rep.Body.Close()
		list, err := io.ReadAll(rep.Body)
		must.Do(t, err)
		return strings.Count(string(list), `"m"`) == 1
	})
}
