package examples

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestTheExamplesRunTogether(t *testing.T) {
	dir := t.TempDir()
	socket := filepath.Join(dir, "private", "broker.sock")
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel) // last: after the processes were stopped
	start := func(pkg string, args ...string) *exec.Cmd {
		bin := filepath.Join(dir, filepath.Base(pkg))
		if out, err := exec.CommandContext(ctx, "go", "build", "-o", bin, pkg).CombinedOutput(); err != nil {
			t.Fatalf("build %s: %v\n%s", pkg, err, out)
		}
		cmd := exec.CommandContext(ctx, bin, args...)
		cmd.Env = append(os.Environ(), "RINGBATCH_SOCKET="+socket)
		return cmd
	}
	background := func(cmd *exec.Cmd) {
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = cmd.Process.Signal(os.Interrupt)
			if err := cmd.Wait(); err != nil {
				t.Errorf("%s: %v", cmd.Path, err)
			}
		})
	}
	worker, producer := start("./worker"), start("./producer")
	background(start("../../cmd/ringbatch", "broker", "--log_level", "warn"))
	for range 200 {
		if _, err := os.Stat(socket); err == nil {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	background(worker)
	out, err := producer.CombinedOutput()
	if err != nil {
		t.Fatalf("producer: %v\n%s", err, out)
	}
	for _, want := range []string{"simple: [2 4 6 8]", "in place 3: [60 62 64 66]"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("the producer did not print %q:\n%s", want, out)
		}
	}
}
