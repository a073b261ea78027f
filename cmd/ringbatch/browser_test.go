// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/must"
)

// browser is a real browser that a test uses as a person does, by the DevTools protocol over
// two pipes.
type browser struct {
	t       *testing.T
	in      *bufio.Reader
	out     *os.File
	calls   int
	session string // of the one page
}

func (c *cli) browser(width, height int, address string) *browser {
	c.t.Helper()
	fromUs, toThem, err := os.Pipe()
	must.Do(c.t, err)
	toUs, fromThem, err := os.Pipe()
	must.Do(c.t, err)
	cmd := exec.Command("chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
		"--user-data-dir="+c.bed.Path("profile"), "--remote-debugging-pipe",
		fmt.Sprintf("--window-size=%d,%d", width, height), "about:blank")
	cmd.ExtraFiles = []*os.File{fromUs, fromThem} // 3 and 4
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	must.Do(c.t, cmd.Start())
	fromUs.Close()
	fromThem.Close()
	c.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		toThem.Close()
		toUs.Close()
	})
	_ = toUs.SetReadDeadline(time.Now().Add(2 * time.Minute)) // a browser that hangs
	b := &browser{t: c.t, in: bufio.NewReaderSize(toUs, 1<<20), out: toThem}
	var target struct{ TargetID string }
	b.call("Target.createTarget", map[string]any{"url": address}, &target)
	var attached struct{ SessionID string }
	b.call("Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true}, &attached)
	b.session = attached.SessionID
	return b
}

// call runs one command of the protocol and skips events.
func (b *browser) call(method string, parameters map[string]any, result any) {
	b.t.Helper()
	b.calls++
	text, err := json.Marshal(map[string]any{"id": b.calls, "method": method, "params": parameters, "sessionId": b.session})
	if b.session == "" {
		text, err = json.Marshal(map[string]any{"id": b.calls, "method": method, "params": parameters})
	}
	must.Do(b.t, err)
	if _, err := b.out.Write(append(text, 0)); err != nil {
		b.t.Fatalf("chromium: %v", err)
	}
	for {
		text, err := b.in.ReadBytes(0)
		if err != nil {
			b.t.Fatalf("chromium: %s: %v", method, err)
		}
		var m struct {
			ID     int
			Result json.RawMessage
			Error  *struct{ Message string }
		}
		if err := json.Unmarshal(text[:len(text)-1], &m); err != nil {
			b.t.Fatalf("chromium: %v: %s", err, text)
		}
		if m.ID != b.calls {
			continue
		}
		if m.Error != nil {
			b.t.Fatalf("chromium: %s: %s", method, m.Error.Message)
		}
		if result != nil {
			must.Do(b.t, json.Unmarshal(m.Result, result))
		}
		return
	}
}

// eval is the value of an expression on the page.
func (b *browser) eval(expression string, into any) {
	b.t.Helper()
	var r struct {
		Result           struct{ Value json.RawMessage }
		ExceptionDetails *struct {
			Exception struct{ Description string }
		}
	}
	b.call("Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true, "awaitPromise": true}, &r)
	if r.ExceptionDetails != nil {
		b.t.Fatalf("%s: %s", expression, r.ExceptionDetails.Exception.Description)
	}
	if len(r.Result.Value) > 0 {
		if err := json.Unmarshal(r.Result.Value, into); err != nil {
			b.t.Fatalf("%s: %v in %s", expression, err, r.Result.Value)
		}
	}
}

// has waits until an expression is true on the page.
func (b *browser) has(what, expression string) {
	b.t.Helper()
	ok := false
	if waitFor(func() bool { b.eval("!!("+expression+")", &ok); return ok }) != nil {
		var text string
		b.eval("document.body ? document.body.innerText : ''", &text)
		b.t.Fatalf("%s: never: %s\n%s", what, expression, text)
	}
}

// click moves the mouse to an element and clicks; again if the page moved meanwhile, and
// something else was under the mouse.
func (b *browser) click(selector string) {
	b.t.Helper()
	b.has(selector+" is there", "document.querySelector("+quote(selector)+")")
	hit := false
	if waitFor(func() bool {
		var at struct{ X, Y float64 }
		b.eval(fmt.Sprintf(`(() => {
			const e = document.querySelector(%s);
			window.clicked = false;
			e.addEventListener('click', () => { window.clicked = true; }, { once: true });
			e.scrollIntoView({ block: 'center' });
			const r = e.getBoundingClientRect();
			return { x: r.x + r.width / 2, y: r.y + r.height / 2 };
		})()`, quote(selector)), &at)
		for _, kind := range []string{"mousePressed", "mouseReleased"} {
			b.call("Input.dispatchMouseEvent", map[string]any{"type": kind, "x": at.X, "y": at.Y, "button": "left", "clickCount": 1}, nil)
		}
		b.eval("!!window.clicked", &hit)
		return hit
	}) != nil {
		b.t.Fatalf("%s was never clicked", selector)
	}
}

// typeInto clicks on a field and types.
func (b *browser) typeInto(selector, text string) {
	b.t.Helper()
	b.click(selector)
	b.call("Input.insertText", map[string]any{"text": text}, nil)
}

// screenshot leaves a picture in RINGBATCH_SCREENSHOTS, for a person to look at.
func (b *browser) screenshot(name string) {
	b.t.Helper()
	folder := os.Getenv("RINGBATCH_SCREENSHOTS")
	if folder == "" {
		return
	}
	var r struct{ Data string }
	b.call("Page.captureScreenshot", map[string]any{"format": "png", "captureBeyondViewport": true}, &r)
	picture, err := base64.StdEncoding.DecodeString(r.Data)
	if err == nil {
		err = os.WriteFile(strings.TrimSuffix(folder, "/")+"/"+name+".png", picture, 0o644)
	}
	must.Check(b.t, err)
}

func quote(s string) string {
	text, _ := json.Marshal(s)
	return string(text)
}
