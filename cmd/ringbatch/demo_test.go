// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
)

func TestTheDemoServesThePageUnderLoadAndLeavesNothingBehind(t *testing.T) {
	c := startCLI(t)
	d := c.start("demo", "--http", "0")
	page, socket := "", ""
	c.until("it says where the page is", func() bool {
		for _, line := range strings.Split(d.Log(), "\n") {
			if strings.HasPrefix(line, "http://") {
				page = line
			}
			if _, path, ok := strings.Cut(line, "--socket "); ok {
				socket = path
			}
		}
		return socket != ""
	})
	for _, url := range []string{page, strings.TrimSuffix(page, "dashboard")} { // the root leads to the page
		if text, code := get(t, url); code != 200 || !strings.Contains(text, "<title>ringbatch") {
			t.Errorf("%s: %d", url, code)
		}
	}
	if _, code := get(t, strings.TrimSuffix(page, "dashboard")+"nothing"); code != 404 {
		t.Errorf("a page that does not exist: %d", code)
	}
	c.until("both models answer", func() bool {
		text, _ := get(t, page+"/api/stats")
		return strings.Count(text, `"OK":`) == 2
	})
	var pids []int
	c.until("three processes run", func() bool {
		pids = nil
		for _, p := range c.statsOf(socket).Processes {
			if p.Pid != 0 {
				pids = append(pids, p.Pid)
			}
		}
		return len(pids) == 3
	})
	d.Signal(syscall.SIGINT)
	if err := d.Wait(patience); err != nil {
		t.Errorf("%v\n%s", err, d.Log())
	}
	for _, pid := range pids {
		c.until(fmt.Sprintf("process %d has ended", pid), func() bool { return hasEnded(pid) })
	}
}
