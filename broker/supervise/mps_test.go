// SPDX-License-Identifier: Apache-2.0

package supervise

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/internal/must"
)

// fakeMPS stands in for nvidia-cuda-mps-control: it only keeps the books of
// starting, answering and stopping, so that these can be tested without a GPU.
// Its server, 4242, has faulted while there is a file fault in the folder of pipes.
const fakeMPS = `#!/bin/sh
pipe=${CUDA_MPS_PIPE_DIRECTORY:?}
if [ "$1" = -d ]; then
	[ -n "$FAKE_MPS_BROKEN" ] && exit 1
	echo "started log=$CUDA_MPS_LOG_DIRECTORY" >> "$FAKE_MPS_BOOK"
	: > "$pipe/control"
	exit 0
fi
read command
[ -e "$pipe/control" ] || exit 1
echo "$command" >> "$FAKE_MPS_BOOK"
case "$command" in
get_server_list) echo 4242 ;;
get_server_status*) [ -e "$pipe/fault" ] && echo FAULT || echo ACTIVE ;;
shutdown_server*) rm -f "$pipe/fault" ;;
quit*) rm "$pipe/control" ;;
esac
exit 0
`

// installFakeMPS puts it on the PATH and returns the file it writes to.
func installFakeMPS(t *testing.T) string {
	dir := t.TempDir()
	must.Do(t, os.WriteFile(filepath.Join(dir, mpsControl), []byte(fakeMPS), 0o700))
	book := filepath.Join(dir, "book")
	t.Setenv("PATH", dir+":/usr/bin:/bin")
	t.Setenv("FAKE_MPS_BOOK", book)
	t.Setenv("CUDA_MPS_PIPE_DIRECTORY", filepath.Join(dir, "nobody"))
	return book
}

func TestAPrivateMPSDaemonIsStartedForTheWorkersAndStoppedAfterThem(t *testing.T) {
	book := installFakeMPS(t)
	w := role("worker")
	w.ThreadPercentage = 40
	s := start(t, true, w)
	s.until("the worker works", s.says("msg=working", 1))
	pipe := filepath.Join(filepath.Dir(s.socket), "mps-b", "pipe")
	if _, mps := s.Snapshot(); mps != "own daemon, pipe "+pipe {
		t.Error(mps)
	}
	if log := s.log.String(); !strings.Contains(log, "pipe "+pipe+" percentage 40") {
		t.Errorf("the worker was not told:\n%s", log)
	}
	s.end()
	text, _ := os.ReadFile(book)
	if got := string(text); !strings.HasPrefix(got, "started log="+filepath.Dir(pipe)+"/log\n") || !strings.HasSuffix(got, "quit\n") {
		t.Errorf("the daemon saw:\n%s", got)
	}
	if _, err := os.Stat(filepath.Dir(pipe)); !os.IsNotExist(err) {
		t.Error("its folders are left behind")
	}
}

func TestARunningMPSDaemonIsUsedAndLeftAlone(t *testing.T) {
	book := installFakeMPS(t)
	pipe := os.Getenv("CUDA_MPS_PIPE_DIRECTORY")
	must.Do(t, os.MkdirAll(pipe, 0o700))
	must.Do(t, os.WriteFile(filepath.Join(pipe, "control"), nil, 0o600))
	s := start(t, true, role("worker"))
	s.until("the worker works", s.says("msg=working", 1))
	if _, mps := s.Snapshot(); mps != "daemon of the system, pipe "+pipe {
		t.Error(mps)
	}
	s.end()
	if text, _ := os.ReadFile(book); strings.Contains(string(text), "started") || strings.Contains(string(text), "quit") {
		t.Errorf("the daemon saw:\n%s", text)
	}
}

// The contexts of all clients are broken then, and the server refuses new ones.
func TestAnMPSServerThatHasFaultedIsStartedAgainWithAllWorkers(t *testing.T) {
	refused := role("worker") // says once what CUDA says to a new client of such a server
	script := `if [ -e "$1" ]; then exec "$2"; fi; : > "$1"; echo CUDA error: ` + mpsNotReady + `; exit 1`
	refused.Command = []string{"/bin/sh", "-c", script, "sh", filepath.Join(t.TempDir(), "said"), refused.Command[0]}
	for kind, last := range map[string]Worker{"its status": role("worker"), "what a worker says": refused} {
		t.Run("seen by "+kind, func(t *testing.T) {
			book := installFakeMPS(t)
			lost := make(chan struct{}, 1)
			s := startWith(t, true, func() { lost <- struct{}{} }, role("worker"), role("worker"), last)
			if kind == "its status" {
				list := s.until("all work", s.says("msg=working", 3))
				pipe := filepath.Join(filepath.Dir(s.socket), "mps-b", "pipe")
				must.Do(t, os.WriteFile(filepath.Join(pipe, "fault"), nil, 0o600))
				_ = syscall.Kill(list[2].Pid, syscall.SIGKILL)
			}
			<-lost
			s.until("all work again", func(list []stats.Process) bool {
				again := func(p stats.Process) bool { return p.State == "running" && p.Restarts == 1 }
				return len(list) == 3 && again(list[0]) && again(list[1]) && again(list[2])
			})
			s.end()
			text, _ := os.ReadFile(book)
			_, after, _ := strings.Cut(string(text), "shutdown_server 4242 -f\n")
			if !strings.Contains(after, "quit -t 1\n") || !strings.Contains(after, "started ") || strings.Contains(after, "shutdown") {
				t.Errorf("the daemon saw:\n%s", text)
			}
		})
	}
}

// The old broker's workers need it if the new one does not come up.
func TestABrokerThatGivesUpATakeOverLeavesMPSToTheOldOne(t *testing.T) {
	installFakeMPS(t)
	old := start(t, true, role("worker"))
	old.until("the worker works", old.says("msg=working", 1))
	pipe := filepath.Join(filepath.Dir(old.socket), "mps-b", "pipe")
	for _, takes := range []bool{false, true} {
		next := New(old.Supervisor.log, old.socket)
		must.Do(t, next.WarmUp(t.Context(), old.socket, true))
		if takes {
			old.LeaveMPS()
			old.end()
			next.StartClients()
		}
		next.Stop()
		next.Wait()
		if _, err := os.Stat(filepath.Join(pipe, "control")); os.IsNotExist(err) != takes {
			t.Errorf("taken over: %v; the daemon: %v", takes, err)
		}
	}
}

func TestPipesOfOthersAreNotTrusted(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root, to have files of another user")
	}
	folder := filepath.Join(t.TempDir(), "mps")
	control := filepath.Join(folder, "control")
	must.Do(t, errors.Join(os.Mkdir(folder, 0o777), os.WriteFile(control, nil, 0o666)))
	if !isTrusted(folder) || !isTrusted(folder+"-missing") {
		t.Error("one's own, or none, is not trusted")
	}
	for _, path := range []string{control, folder} {
		must.Do(t, os.Chown(path, 12345, -1))
		if isTrusted(folder) {
			t.Errorf("%s of another user is trusted", path)
		}
		_ = os.Chown(path, 0, -1)
	}
	link := folder + "-link"
	if err := os.Symlink(folder, link); err != nil || isTrusted(link) {
		t.Errorf("a link is trusted, %v", err)
	}
}

func TestWithoutMPSTheBrokerSaysSoAndGoesOn(t *testing.T) {
	for kind, says := range map[string]string{"not installed": " is not installed here", "does not start": " -d"} {
		t.Run(kind, func(t *testing.T) {
			installFakeMPS(t)
			t.Setenv("FAKE_MPS_BROKEN", "1")
			if kind == "not installed" {
				t.Setenv("PATH", t.TempDir())
			}
			s := start(t, true, role("worker"))
			s.until("the worker works", s.says("msg=working", 1))
			if _, mps := s.Snapshot(); !strings.HasPrefix(mps, "not available: nvidia-cuda-mps-control"+says) {
				t.Error(mps)
			}
			if !strings.Contains(s.log.String(), "no MPS: GPU workers will take turns") {
				t.Error(s.log)
			}
		})
	}
}
