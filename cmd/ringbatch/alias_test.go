// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// version is a model whose worker multiplies by its scale.
func (c *cli) version(name string, scale, width int) string {
	return fmt.Sprintf("[[model]]\nname = %q\ninputs = [\"x:f32[%d]\"]\noutputs = [\"y:f32[%d]\"]\nmax_batch_size = 16\nslots = "+
		"256\nwait_time = 0\n"+
		"[[model.worker]]\ncommand = [%q, \"worker\", \"affine\", \"--name\", %q, \"--scale\", \"%d\", \"--input\", "+
		"\"x:f32[%d]\"]\n", name, width, width, c.bin, name, scale, width)
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

// callers are clients of an alias that send requests until they are ended.
type callers struct {
	stop    chan struct{}
	done    sync.WaitGroup
	clients []*client.Client
	scale   []atomic.Int64 // of the version that answered each caller last
	answers [4]atomic.Int64
}

func (c *cli) callers(n int) *callers {
	c.t.Helper()
	k := &callers{stop: make(chan struct{}), scale: make([]atomic.Int64, n)}
	for i := range n {
		cl, err := client.Dial(c.t.Context(), "m")
		must.Do(c.t, err)
		k.clients = append(k.clients, cl)
		k.done.Go(func() { k.call(c.t, i, cl) })
	}
	c.t.Cleanup(k.end)
	return k
}

func (k *callers) call(t *testing.T, i int, cl *client.Client) {
	for n := 1; ; n++ {
		select {
		case <-k.stop:
			return
		default:
		}
		x := float32(n%1000 + 1)
		outs, err := cl.Infer(t.Context(), []float32{x, x, x, x})
		if err != nil {
			t.Errorf("caller %d, request %d: %v", i, n, err)
			return
		}
		y, err := tensor.As[float32](outs[0])
		if err != nil || y[0] != x && y[0] != 2*x {
			t.Errorf("caller %d: %v of %v belongs to no version (%v)", i, y, x, err)
			return
		}
		scale := int64(y[0] / x)
		k.answers[scale].Add(1)
		k.scale[i].Store(scale)
	}
}

func (k *callers) end() {
	select {
	case <-k.stop:
	default:
		close(k.stop)
	}
	k.done.Wait()
	for _, cl := range k.clients {
		_ = cl.Close()
	}
}

// count is how many callers a version answered last.
func (k *callers) count(scale int64) (n int) {
	for i := range k.scale {
		if k.scale[i].Load() == scale {
			n++
		}
	}
	return n
}

func TestAnAliasIsSwitchedUnderLoadWithoutALostRequest(t *testing.T) {
	c := startCLI(t)
	c.serveVersions("[alias]\nm = \"m@1\"\n")
	k := c.callers(10)
	c.until("all have the first version", func() bool { return k.count(1) == 10 || t.Failed() })
	for i := range 10 {
		to := int64(2 - i%2)
		c.alias("m", fmt.Sprintf("m@%d", to))
		c.until("all have the other version", func() bool { return k.count(to) == 10 || t.Failed() })
	}
	// Shares are a gateway's: all clients on the ring have the model with the largest.
	for share, clients := range map[int]int{10: 0, 70: 10} {
		c.alias("m", fmt.Sprintf("m@2=%d", share), fmt.Sprintf("m@1=%d", 100-share))
		c.until("all have the largest share", func() bool { return k.count(2) == clients && k.count(1) == 10-clients || t.Failed() })
		c.until("the statistics say it", func() bool { // clients that moved may not have left yet
			a := c.stats().Aliases
			return len(a) == 1 && a[0].To[1] == (stats.AliasTarget{Model: "m@2", SharePercent: float64(share), Clients: clients})
		})
	}
	k.end()
	var sent, answered uint64
	c.until("the broker has heard of every end", func() bool { // workers answer clients first, then the broker
		sent, answered = 0, 0
		for _, m := range c.stats().Models {
			if m.Name == "m@1" || m.Name == "m@2" {
				sent, answered = sent+m.Requests, answered+m.Ended["OK"]
			}
		}
		return sent == answered
	})
	if got := uint64(k.answers[1].Load() + k.answers[2].Load()); sent != answered || got != sent {
		t.Errorf("%d answers; the broker counts %d of %d", got, answered, sent)
	}
}

func TestAVersionWithoutWorkersGetsNoClientsWhileAnotherHasSome(t *testing.T) {
	c := startCLI(t)
	c.serveVersions("[alias]\nm = \"m@1\"\n")
	w := c.start("worker", "affine", "--name", "m@3", "--scale", "2", "--input", "x:f32[4]")
	c.must("ready", "m@3", "--wait", "1m")
	k := c.callers(4)
	c.alias("m", "m@1=40", "m@3=60")
	c.until("all have the larger share", func() bool { return k.count(2) == 4 || t.Failed() })
	c.ends(w)
	c.until("all have left it", func() bool { return c.stats().Aliases[0].To[1].Clients == 0 })
	w = c.start("worker", "affine", "--name", "m@3", "--scale", "2", "--input", "x:f32[4]")
	c.until("all have it again", func() bool { return k.count(2) == 4 || t.Failed() })
	k.end()
	c.ends(w)
}

func TestAClientFollowsToAnotherSignatureIfItsInputsFit(t *testing.T) {
	c := startCLI(t)
	c.serveVersions("[alias]\nm = \"m@1\"\n")
	dial := func() *client.Client {
		cl, err := client.Dial(t.Context(), "m")
		must.Do(t, err)
		t.Cleanup(func() { _ = cl.Close() })
		return cl
	}
	four, eight, byHand := dial(), dial(), dial()
	claimed, err := byHand.Claim(t.Context(), 1)
	must.Do(t, err)
	wide := make([]float32, 8)
	if _, err := eight.Infer(t.Context(), wide); err != nil { // two rows
		t.Fatal(err)
	}
	c.alias("m", "m@wide")
	c.until("the client of 8 has moved", func() bool { return eight.Model().Name == "m@wide" })
	if outs, err := eight.Infer(t.Context(), wide); err != nil || outs[0].Shape[1] != 8 {
		t.Errorf("8 elements: %v, %v", outs, err)
	}
	mismatch := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, status.ErrSignatureMismatch) || !strings.Contains(err.Error(), "x:f32[8]") {
			t.Errorf("%s: %v", what, err)
		}
	}
	c.until("the others have moved", func() bool { return four.Model().Name == "m@wide" && byHand.Model().Name == "m@wide" })
	_, err = four.Infer(t.Context(), wide[:4])
	mismatch("4 elements", err)
	_, err = byHand.Claim(t.Context(), 1)
	mismatch("claim", err)
	_, err = byHand.TryClaim(1)
	mismatch("claim", err)
	// A request is answered by the version at which it was claimed.
	if err := errors.Join(claimed.Commit(t.Context()), claimed.Wait(t.Context()), claimed.Release()); err != nil {
		t.Errorf("claimed before: %v", err)
	}
	c.alias("m", "m@1") // and back
	c.until("it fits again", func() bool { _, err := four.Infer(t.Context(), wide[:4]); return err == nil })
	c.until("claim works again", func() bool {
		r, err := byHand.Claim(t.Context(), 1)
		return err == nil && r.Release() == nil
	})
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
		{"alias m m@1=50 m@2=40", 2, "add up to 90 %"},
		{"alias m m@1 m@2", 2, "has no share"},
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
	if out := c.must("infer", "m", "1", "2", "3", "4"); !strings.Contains(out, "2 4 6 8") {
		t.Errorf("infer: %s", out)
	}
	if out := c.must("stats", "m"); !strings.Contains(out, "alias m") || !strings.Contains(out, "m@2  100 %") {
		t.Errorf("stats: %s", out)
	}
}

func TestMetricsAndTheRepositoryIndexShowAnAlias(t *testing.T) {
	c := startCLI(t)
	c.serveVersions("[alias]\nm = { \"m@1\" = 75, \"m@2\" = 25 }\n" + c.version("m@3", 3,
		4) + "[model.worker.env]\nRINGBATCH_SOCKET = \"/nonexistent\"\n") // m@3's worker never comes
	base := c.gateway()
	for range 4 {
		cl, err := client.Dial(t.Context(), "m")
		must.Do(t, err)
		t.Cleanup(func() { cl.Close() })
	}
	metrics := func(want map[string]float64) {
		t.Helper()
		text, _ := get(t, base+"/metrics")
		for name, want := range want {
			if got := value(t, text, "ringbatch_alias_"+name); got != want {
				t.Errorf("%s is %v, want %v", name, got, want)
			}
		}
		checkMetrics(t, text)
	}
	index := func(want string) { // eventually: the gateway hears of it
		t.Helper()
		c.until("the index says "+want, func() bool {
			rep, err := http.Post(base+"/v2/repository/index", "application/json", nil)
			must.Do(t, err)
			defer rep.Body.Close()
			var models []struct{ Name, Version, State string }
			must.Do(t, json.NewDecoder(rep.Body).Decode(&models))
			got := ""
			for _, m := range models {
				if m.Name == "m" {
					got += m.Version + " " + m.State + " "
				}
			}
			return got == want
		})
	}
	metrics(map[string]float64{
		`share_ratio{alias="m",model="m@1"}`: 0.75, `share_ratio{alias="m",model="m@2"}`: 0.25,
		`clients{alias="m",model="m@1"}`: 4, `clients{alias="m",model="m@2"}`: 0,
	})
	index("1 READY 2 READY ")
	c.alias("m", "m@2")
	c.until("all have moved", func() bool {
		for _, a := range c.stats().Aliases {
			if a.Name == "m" && len(a.To) == 1 && a.To[0].Clients == 4 {
				return true
			}
		}
		return false
	})
	metrics(map[string]float64{`share_ratio{alias="m",model="m@2"}`: 1, `clients{alias="m",model="m@2"}`: 4})
	if text, _ := get(t, base+"/metrics"); strings.Contains(text, `alias="m",model="m@1"`) {
		t.Error("the metrics still have the former version")
	}
	index("2 READY ")
	if out, code := c.run("alias", "m", "m@2=50", "m@3=50"); code != 1 {
		t.Errorf("a version that would not answer: %d\n%s", code, out)
	}
	c.alias("m", "m@2=50", "m@3=50", "--force")
	index("2 READY 3 UNAVAILABLE ")
}
