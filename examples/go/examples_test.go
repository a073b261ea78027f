// SPDX-License-Identifier: Apache-2.0

package examples

import (
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/testbed"
)

func TestTheExamplesRunTogether(t *testing.T) {
	bed, err := testbed.New(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(bed.Close)
	if out, err := exec.Command("go", "build", "-o", bed.Dir, "./worker", "./producer", "../../cmd/ringbatch").CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	socket := bed.Path("private/broker.sock")
	start := func(name string, args ...string) *testbed.Process {
		p, err := bed.Start(testbed.Spec{Command: append([]string{bed.Path(name)}, args...), Env: []string{"RINGBATCH_SOCKET=" + socket}})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	broker := start("ringbatch", "broker", "--log_level", "warn")
	if err := testbed.Eventually(time.Minute, func() error { _, err := os.Stat(socket); return err }); err != nil {
		t.Fatal(err)
	}
	worker, producer := start("worker"), start("producer")
	if err := producer.Wait(time.Minute); err != nil {
		t.Errorf("producer: %v", err)
	}
	for _, want := range []string{"simple: [2 4 6 8]", "in place 3: [60 62 64 66]"} {
		if !strings.Contains(producer.Log(), want) {
			t.Errorf("the producer did not print %q:\n%s", want, producer.Log())
		}
	}
	for _, p := range []*testbed.Process{worker, broker} {
		p.Signal(syscall.SIGINT) // Ctrl-C ends them well
		if err := p.Wait(time.Minute); err != nil {
			t.Errorf("%s: %v\n%s", p, err, p.Log())
		}
	}
}
