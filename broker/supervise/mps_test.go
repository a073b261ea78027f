// SPDX-License-Identifier: Apache-2.0

package supervise

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// fakeMPS stands in for nvidia-cuda-mps-control: it only keeps the books of
// starting, answering and stopping, so that these can be tested without a GPU.
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
[ "$command" = quit ] && rm "$pipe/control"
exit 0
`

// installFakeMPS puts it on the PATH and returns the file it writes to.
func installFakeMPS(t *testing.T) string {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, mpsControl), []byte(fakeMPS), 0o700); err != nil {
		t.Fatal(err)
	}
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
	if err := os.MkdirAll(pipe, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(pipe, "control"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
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

func TestWithoutMPSTheBrokerSaysSoAndGoesOn(t *testing.T) {
	t.Run("not installed", func(t *testing.T) {
		t.Setenv("PATH", t.TempDir())
		s := start(t, true, role("worker"))
		s.until("the worker works", s.says("msg=working", 1))
		if _, mps := s.Snapshot(); mps != "not available: nvidia-cuda-mps-control is not installed here" {
			t.Error(mps)
		}
		if !strings.Contains(s.log.String(), "no MPS: GPU workers will take turns") {
			t.Error(s.log)
		}
	})
	t.Run("does not start", func(t *testing.T) {
		installFakeMPS(t)
		t.Setenv("FAKE_MPS_BROKEN", "1")
		s := start(t, true, role("worker"))
		s.until("the worker works", s.says("msg=working", 1))
		if _, mps := s.Snapshot(); !strings.HasPrefix(mps, "not available: nvidia-cuda-mps-control -d") {
			t.Error(mps)
		}
	})
}
