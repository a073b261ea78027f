// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/gateway/console"
	"github.com/ringbatch/ringbatch/internal/must"
)

// browse loads a page in a real browser, lets it run for a virtual while, and returns the
// document.
func (c *cli) browse(address string, flags ...string) string {
	c.t.Helper()
	args := append([]string{"--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
		"--user-data-dir=" + c.bed.Path("browser"), "--virtual-time-budget=4000"}, flags...)
	cmd := exec.Command("chromium", append(args, address)...)
	out, err := cmd.Output()
	if err != nil {
		c.t.Fatalf("chromium: %v\n%s", err, out)
	}
	return string(out)
}

// shown is a number of the page.
func shown(t *testing.T, dom, key string) string {
	t.Helper()
	m := regexp.MustCompile(`data-key="` + key + `">([^<]*)<`).FindStringSubmatch(dom)
	if m == nil {
		t.Fatalf("the page does not show %s:\n%.3000s", key, dom)
	}
	return m[1]
}

func TestThePageShowsTheStatistics(t *testing.T) {
	if !needs(t, "chromium") {
		t.Skip()
	}
	c := startCLI(t)
	base := c.gateway()
	c.reload(c.served(2, 2, 0))
	c.must("ready", "--wait", "2m")
	stop := c.keepAsking() // until the browser has looked, however long it takes to start
	var before stats.Model
	dom := ""
	c.until("the page shows what happened in the last 10 s", func() bool {
		before = c.stats().Models[0]
		dom = c.browse(base+"/dashboard", "--dump-dom")
		return !strings.HasPrefix(shown(t, dom, "requests_per_s"), "0")
	})
	stop()
	m := c.stats().Models[0]
	c.until("the broker has heard of every end", func() bool { // workers answer clients first, then the broker
		m = c.stats().Models[0]
		return m.Ended["OK"] == m.Requests
	})
	ok := regexp.MustCompile(`>OK (\d+)<`).FindStringSubmatch(dom)
	if ok == nil {
		t.Fatalf("the page does not show how many requests ended OK:\n%.3000s", dom)
	}
	for _, n := range []struct {
		what, shown string
		low, high   uint64
	}{
		{"requests", shown(t, dom, "requests"), before.Requests, m.Requests},
		{"requests that ended OK", ok[1], before.Ended["OK"], m.Ended["OK"]},
	} {
		if got, err := strconv.ParseUint(n.shown, 10, 64); err != nil || got < max(1, n.low) || got > n.high {
			t.Errorf("the page shows %s %s, stats told %d before and %d after", n.shown, n.what, n.low, n.high)
		}
	}
	for key, most := range map[string]float64{"requests_per_s": 1e9, "p99": m.Latency.Total.Max * 1.1, "rows_per_batch": 8} {
		if v, err := strconv.ParseFloat(strings.Fields(shown(t, dom, key))[0], 64); err != nil || v <= 0 || v > most {
			t.Errorf("the page shows %s = %v, %v", key, shown(t, dom, key), err)
		}
	}
	for _, text := range []string{">ready<", "affine-0", "affine-1", "read-only"} {
		if !strings.Contains(dom, text) {
			t.Errorf("the page lacks %q", text)
		}
	}
	if outside := regexp.MustCompile(`(?:src|href)="(https?:)?//`).FindString(dom); outside != "" {
		t.Errorf("the page loads something from outside: %s", outside)
	}
}

func TestThePageChangesThingsOnlyWithAToken(t *testing.T) {
	c := startCLI(t)
	const token = "0123456789abcdef"
	file := c.bed.Path("tokens")
	must.Do(t, os.WriteFile(file, []byte("# who may change things\nops "+token+"\n"), 0o600))
	locked, open := c.gateway(), c.gateway("--admin-token-file", file)
	if text, code := get(t, locked+"/"); code != 200 || !strings.Contains(text, "<title>") {
		t.Errorf("the root does not lead to the page: %d\n%s", code, text)
	}
	change := func(base, token, body string) (int, string) {
		r, _ := http.NewRequest(http.MethodPost, base+"/dashboard/api/change", strings.NewReader(body))
		r.Header.Set(console.AdminHeader, token)
		rep, err := http.DefaultClient.Do(r)
		must.Do(t, err)
		defer rep.Body.Close()
		text, _ := io.ReadAll(rep.Body)
		return rep.StatusCode, string(text)
	}
	const body = `{"Model":"affine","Settings":{"wait_time":"8ms","max_batch_size":"16"}}`
	for _, try := range []struct {
		base, token, body string
		code              int
		says              string
	}{
		{locked, token, body, 403, "--admin"},
		{open, "", body, 403, "unknown token"},
		{open, "0123456789abcdeF", body, 403, "unknown token"},
		{open, token, `{"Model":"nobody","Settings":{"wait_time":"8ms"}}`, 400, "no such model"},
		{open, token, `{"Model":"affine","Settings":{"wait_time":"soon"}}`, 400, "wait_time"},
		{open, token, `{`, 400, "not understood"},
		{open, token, `{"Model":"affine","Instances":2}`, 400, "starts no workers"},
	} {
		if code, text := change(try.base, try.token, try.body); code != try.code || !strings.Contains(text, try.says) {
			t.Errorf("%s with %q: %d %q, want %d and %q", try.body, try.token, code, text, try.code, try.says)
		}
	}
	if m := c.stats().Models[0]; m.WaitTimeMS != 5 {
		t.Errorf("a refused change was taken: %v ms", m.WaitTimeMS)
	}
	if code, text := change(open, token, body); code != 200 {
		t.Errorf("with the token: %d %s", code, text)
	}
	if m := c.stats().Models[0]; m.WaitTimeMS != 8 || m.MaxBatchSize != 16 {
		t.Errorf("after the change: %v ms, %d rows", m.WaitTimeMS, m.MaxBatchSize)
	}
}
