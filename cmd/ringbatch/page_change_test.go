// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"testing"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/internal/must"
)

// A person with a token changes a model on the page and watches what becomes of
// it; one without can only read.
func TestOnThePageSettingsAndInstancesAreChangedWithATokenAndSeenInStats(t *testing.T) {
	if os.Getenv("RINGBATCH_TEST_ALL") == "" || !needs(t, "chromium") {
		t.Skip("make operate runs it")
	}
	c := startCLI(t)
	const token = "0123456789abcdef"
	file := c.bed.Path("tokens")
	must.Do(t, os.WriteFile(file, []byte("ops "+token+"\n"), 0o600))
	base := c.gateway("--admin-token-file", file)
	c.reload(c.served(2, 1, 0) + "[[model]]\nname = \"other\"\ninputs = [\"x:u8[1]\"]\noutputs = [\"y:u8[1]\"]\n")
	c.must("ready", "affine", "--wait", "2m")
	l := c.load(4)
	affine := func() *stats.Model { s := c.stats(); return s.Model("affine") }

	b := c.browser(1200, 900, base+"/dashboard")
	const card, other = "section[data-model=affine] ", "section[data-model=other] "
	says := func(selector, text string) string {
		return "document.querySelector(" + quote(selector) + ")?.textContent.includes(" + quote(text) + ")"
	}
	disabled := func(selector string) string {
		return "document.querySelector(" + quote(selector) + ")?.disabled"
	}
	b.has("the model", says(card+"h2", "affine"))
	b.has("the load", "Number(document.querySelector("+quote(card+"[data-key=requests]")+").textContent) > 0")
	for _, field := range []string{"input[name=wait_time]", "input[name=max_batch_size]", "input[name=instances]", "form button"} {
		b.has("read-only", disabled(card+field))
	}
	b.has("read-only", says("#access", "read-only"))

	b.typeInto("#secret", "not the right token")
	b.click("#token button")
	b.has("a wrong token", says("#access", "unknown token"))
	b.has("still read-only", disabled(card+"form button"))

	b.typeInto("#secret", token)
	b.click("#token button")
	b.has("the token", says("#access", "changes are allowed"))
	b.has("unlocked", "!"+disabled(card+"input[name=instances]"))
	b.has("a model whose workers the broker does not start", disabled(other+"input[name=instances]"))
	b.screenshot("unlocked")

	b.typeInto(card+"input[name=wait_time]", "soon")
	b.click(card + "form button")
	b.has("a mistake is told", says(card+"form", "wait_time"))
	b.eval("document.querySelector("+quote(card+"form")+").reset()", new(any))

	b.typeInto(card+"input[name=wait_time]", "8ms")
	b.typeInto(card+"input[name=max_batch_size]", "16")
	b.typeInto(card+"input[name=instances]", "2")
	b.click(card + "form button")
	b.has("the change", says(card+"form", "changed"))
	if m := affine(); m.WaitTimeMS != 8 || m.MaxBatchSize != 16 || len(m.Workers) != 2 {
		t.Errorf("stats: %v ms, %d rows, %d workers", m.WaitTimeMS, m.MaxBatchSize, len(m.Workers))
	}
	b.has("its effect on the page", says(card, "wait 8.00 ms · up to 16 rows")+" && "+says(card+"tbody", "affine-1"))
	b.screenshot("changed")

	b.typeInto(card+"input[name=instances]", "1")
	b.click(card + "form button")
	c.until("one worker is left", func() bool { return len(affine().Workers) == 1 })
	b.has("the page shows it", "!"+says(card+"tbody", "affine-1")) // its row has gone
	l.end()
	if m := affine(); m.Ended["OK"] != m.Requests || uint64(l.answers.Load()) != m.Requests {
		t.Errorf("%d answers; the broker counts %v of %d", l.answers.Load(), m.Ended, m.Requests)
	}

	// The same page of a gateway without tokens cannot be unlocked.
	locked := c.gateway()
	b.call("Page.navigate", map[string]any{"url": locked + "/dashboard"}, nil)
	b.has("the other gateway", "location.href.startsWith("+quote(locked)+") && "+says("#access",
		"read-only")+" && document.getElementById('secret').hidden")
	b.has("its fields", disabled(card+"form button"))

	// On a phone, in the dark, nothing is wider than the screen.
	b.call("Emulation.setDeviceMetricsOverride", map[string]any{"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": true}, nil)
	b.call("Emulation.setEmulatedMedia", map[string]any{"features": []map[string]string{{"name": "prefers-color-scheme",
		"value": "dark"}}}, nil)
	b.has("it fits a phone", "document.documentElement.scrollWidth <= 360")
	b.screenshot("phone-dark")
}
