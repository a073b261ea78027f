// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/ringbatch/ringbatch/test/testbed"
)

// Kinds are the clients: whatever a Go client survives, a Python client must survive, too. The Python client is the C
// library with the Python package above it; its roles are in peers/peer.py.
var Kinds = []string{"go", "python"}

//go:embed peers/*.py
var peerScripts embed.FS

// peerKit locates the programs of the other kinds, which make puts beside this one.
type peerKit struct {
	kinds []string // that can be played here
	dir   string   // libringbatch.so and the folder python
	why   error    // a kind cannot be played
}

// pythonEnv names the interpreter of the Python client; it needs NumPy.
const pythonEnv = "RINGBATCH_PYTHON"

func python() string {
	if p := os.Getenv(pythonEnv); p != "" {
		return p
	}
	return "python3"
}

var findPeers = sync.OnceValue(func() peerKit {
	self, err := os.Executable()
	if err != nil {
		return peerKit{kinds: Kinds[:1], why: err}
	}
	k := peerKit{kinds: Kinds[:1:1], dir: filepath.Dir(self)}
	try := exec.Command(python(), "-c", "from ringbatch.binding import library; library.load()")
	try.Env = append(os.Environ(), k.env()...)
	if out, err := try.CombinedOutput(); err != nil {
		k.why = fmt.Errorf("no Python client: %s: %w (it needs NumPy; $%s names another interpreter): %s",
			python(), err, pythonEnv, out[max(0, len(out)-200):])
	} else {
		k.kinds = append(k.kinds, "python")
	}
	return k
})

func (k *peerKit) env() []string {
	return []string{"PYTHONPATH=" + filepath.Join(k.dir, "python"), "RINGBATCH_LIBRARY=" + filepath.Join(k.dir, "libringbatch.so"),
		"PYTHONDONTWRITEBYTECODE=1"}
}

// kinds returns the kinds of this run, and reports a missing kind as not judged.
func (r *run) kinds() []string {
	k := findPeers()
	if k.why != nil {
		r.notJudged("%v", k.why)
	}
	return k.kinds
}

// peer starts a Python client.
func (r *run) peer(args ...string) *testbed.Process { return r.script("peer.py", args...) }

// script starts a script of the folder peers.
func (r *run) script(name string, args ...string) *testbed.Process {
	k := findPeers()
	path := r.bed.Path(name)
	if _, err := os.Stat(path); err != nil {
		text, err := peerScripts.ReadFile("peers/" + name)
		r.must(errors.Join(err, os.WriteFile(path, text, 0o644)))
	}
	return r.start(testbed.Spec{Program: append([]string{python(), path}, args...), Env: k.env()})
}

// loadEveryKind starts honest clients of every kind, with their own deadlines.
func (h *host) loadEveryKind(threads int, pause, timeout time.Duration) {
	for _, kind := range h.r.kinds() {
		if kind == "go" {
			h.load(loadJob{Load: threads, Pause: int(pause.Microseconds()), Timeout: timeout})
			continue
		}
		h.addLoad(h.r.peer("load", h.socket(), theModel.Name, strconv.Itoa(h.r.intn(1<<30)), strconv.Itoa(threads),
			strconv.Itoa(int(pause.Microseconds())), strconv.Itoa(int(timeout.Milliseconds()))))
	}
}

// victims are processes that fork clients, one at a time, which die.
type victims struct {
	r    *run
	kind string
	idle chan *testbed.Process
}

func (r *run) victims(kind string) *victims {
	v := &victims{r, kind, make(chan *testbed.Process, width)}
	for range width {
		p := r.peer("victims", r.socket(), theModel.Name)
		r.must(p.Expect("ready", nil, enoughTime))
		v.idle <- p
	}
	return v
}

// dies makes a client die at a step, and returns its number and the time of its death.
func (v *victims) dies(step string, after int) (pid int, at time.Time, ok bool) {
	p := <-v.idle
	defer func() { v.idle <- p }()
	var died struct {
		Pid int
		At  int64
	}
	err := p.Send(fmt.Sprintf("%s %d %d", step, after, v.r.intn(1<<30)))
	if err == nil {
		err = p.Expect("died", &died, enoughTime)
	}
	if err != nil || died.At == 0 {
		v.r.fail("a %s client that should die at %q ended: %v\n%s", v.kind, step, err, p.Log())
		return 0, at, false
	}
	return died.Pid, time.Unix(0, died.At), true
}
