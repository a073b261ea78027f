// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// forged is a line that a peer would like to see in somebody's terminal.
const forged = "FORGED"

// texts are what peers call themselves.
func (r *run) text() string {
	return []string{
		strings.Repeat("long", 1+r.intn(16_000)),
		"\x1b[2J\x1b[1;1H" + forged + "\x1b]0;title\x07",
		"worker\n" + forged + ": everything is fine\r\n",
		"\u202e" + forged + "\u2066\u200b\ufeff",
		string([]byte{0xff, 0xfe, 0x80}) + "\x00\x7f\u0085" + forged,
		strings.Repeat("é", 1+r.intn(5_000)),
	}[r.intn(6)]
}

// peersTexts has peers with long names, names that steer terminals and names
// that forge lines, and many models: statistics stay whole, and what people see
// is printable.
func peersTexts(r *run) {
	h := r.startHost(r.brokerJob(), 1, testbed.Spec{})
	h.load(loadJob{Load: 2, Pause: 4000})
	sig := theModel.Signature()
	var sessions []*attach.Session
	defer func() {
		for _, s := range sessions {
			s.HangUp()
			s.Close()
		}
	}()
	refused := 0
	for i := range r.events {
		req := &control.Request{Op: control.OpClient, Model: theModel.Name, Name: r.text(), Window: 1}
		if i%3 > 0 {
			req = &control.Request{Op: control.OpWorker, Model: fmt.Sprintf("texts-%d", i), Name: r.text(), Policy: map[string]string{"slots": "32"},
				Worker: &control.WorkerInfo{Inputs: tensor.SpecTexts(sig.Inputs), Outputs: tensor.SpecTexts(sig.Outputs), Depth: 1, GPU: r.text()}}
		}
		s, err := attach.Open(r.ctx, r.socket(), shm.Memfd{}, req)
		if err != nil {
			refused++ // a text that is too long may be refused, with a name
			r.check(named(err), "refused without a name: %v", err)
			continue
		}
		sessions = append(sessions, s)
		r.progress(i + 1)
	}
	ctx, cancel := context.WithTimeout(r.ctx, enoughTime)
	defer cancel()
	a := admin.New(r.socket())
	s, err := a.Stats(ctx)
	r.check(err == nil && len(s.Models) > 0, "statistics: %v", err)
	models, err := a.Models(ctx)
	r.check(err == nil && len(models) > 0, "models: %v", err)
	r.printable("stats")
	r.printable("stats", "--json")
	for _, s := range sessions {
		s.HangUp()
		s.Close()
	}
	fmt.Printf("   %d peers attached, %d were refused; %d models\n", len(sessions), refused, len(models))
	sessions = nil
	h.endLoads()
}

// printable checks what the ringbatch command prints.
func (r *run) printable(args ...string) {
	tool := filepath.Join(findPeers().dir, "ringbatch")
	if _, err := os.Stat(tool); err != nil {
		r.notJudged("what `ringbatch %s` shows: %v", args[0], err)
		return
	}
	out, err := exec.CommandContext(r.ctx, tool, append(args, "--socket", r.socket())...).Output()
	r.check(err == nil, "ringbatch %v: %v", args, err)
	r.check(utf8.Valid(out), "ringbatch %v prints what is not UTF-8", args)
	for line := range strings.Lines(string(out)) {
		r.check(!strings.HasPrefix(strings.TrimSpace(line), forged), "ringbatch %v prints a forged line: %q", args, line)
		if i := strings.IndexFunc(strings.TrimRight(line, "\n"), func(c rune) bool { return c != '\t' && (!unicode.IsPrint(c) && c != ' ') }); i >= 0 {
			r.fail("ringbatch %v prints %q", args, line[i:min(len(line), i+20)])
		}
	}
}

// named reports whether an error is one of the named ones.
func named(err error) bool {
	var s status.Code
	return errors.As(err, &s)
}
