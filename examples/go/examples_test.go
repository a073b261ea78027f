// SPDX-License-Identifier: Apache-2.0

package examples

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/test/testbed"
)

func TestTheExamplesRunTogether(t *testing.T) {
	bed, err := testbed.New(t.Context())
	must.Do(t, err)
	t.Cleanup(bed.Close)
	build := exec.Command("go", "build", "-o", bed.Dir, "./worker", "./producer", "./service", "./lanes", "../../cmd/ringbatch")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	socket := bed.Path("private/broker.sock")
	start := func(name string, args ...string) *testbed.Process {
		p, err := bed.Start(testbed.Spec{Command: append([]string{bed.Path(name)}, args...), Env: []string{"RINGBATCH_SOCKET=" + socket}})
		must.Do(t, err)
		return p
	}
	broker := start("ringbatch", "broker", "--log-level", "warn")
	must.Do(t, testbed.Eventually(time.Minute, func() error { _, err := os.Stat(socket); return err }))
	worker, producer := start("worker"), start("producer")
	if err := producer.Wait(time.Minute); err != nil {
		t.Errorf("producer: %v", err)
	}
	for _, want := range []string{"simple: [2 4 6 8]", "in place 3: [60 62 64 66]"} {
		if !strings.Contains(producer.Log(), want) {
			t.Errorf("the producer did not print %q:\n%s", want, producer.Log())
		}
	}
	lanes := start("lanes")
	for n, want := range map[string]string{"6": "6 3 10 5 16 8 4 2 1", "1": "1"} {
		p := start("lanes", n)
		if err := p.Wait(time.Minute); err != nil || strings.Join(strings.Fields(p.Log()), " ") != want {
			t.Errorf("the path of %s: %v, %s", n, err, p.Log())
		}
	}
	if p := start("lanes", "0"); p.Wait(time.Minute) == nil || !strings.Contains(p.Log(), "want a number from 1 on") {
		t.Errorf("the path of 0: %s", p.Log())
	}
	stats, err := admin.New(socket).StatsJSON(t.Context())
	if err != nil || !strings.Contains(string(stats), `"rounds":10,`) { // 8 of 6, one of 1 and of 0 each
		t.Errorf("%v: %s", err, stats)
	}
	affine, service := start("ringbatch", "worker", "affine", "--scale", "2", "--offset", "1"), start("service", "--listen", "127.0.0.1:0")
	askTheService(t, service)
	for _, p := range []*testbed.Process{service, affine, worker, lanes, broker} {
		p.Signal(syscall.SIGINT) // Ctrl-C ends them well
		if err := p.Wait(time.Minute); err != nil {
			t.Errorf("%s: %v\n%s", p, err, p.Log())
		}
	}
}

// TestTheServiceAnswersAllRequestsInFlightAtSIGTERM uses a model that takes a second for a
// batch, so that the signal comes before the answers.
func TestTheServiceAnswersAllRequestsInFlightAtSIGTERM(t *testing.T) {
	bed, err := testbed.New(t.Context())
	must.Do(t, err)
	t.Cleanup(bed.Close)
	build := exec.Command("go", "build", "-o", bed.Dir, "./service", "../../cmd/ringbatch")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	start := func(name string, args ...string) *testbed.Process {
		p, err := bed.Start(testbed.Spec{Command: append([]string{bed.Path(name)}, args...), Env: []string{"RINGBATCH_SOCKET=" + bed.Path("private/b.sock")}})
		must.Do(t, err)
		return p
	}
	broker := start("ringbatch", "broker", "--log-level", "warn")
	start("ringbatch", "worker", "simulated", "--name", "affine", "--simulated-fixed", "1s", "--wait", "1m")
	service := start("service", "--listen", "127.0.0.1:0")
	address := addressOf(t, service)
	const requests = 16
	answers := make(chan string, requests)
	for range requests {
		go func() {
			r, err := http.Post("http://"+address, "application/json", strings.NewReader("[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15]"))
			if err != nil {
				answers <- err.Error()
				return
			}
			text, err := io.ReadAll(r.Body)
			r.Body.Close()
			answers <- fmt.Sprint(r.StatusCode, " ", err, " ", string(text))
		}()
	}
	must.Do(t, testbed.Eventually(time.Minute, func() error { // all are in the ring
		s, err := admin.New(bed.Path("private/b.sock")).Stats(t.Context())
		if err == nil && (len(s.Models) == 0 || s.Models[0].Requests < requests) {
			err = errors.New("requests are missing")
		}
		return err
	}))
	service.Signal(syscall.SIGTERM)
	for range requests {
		if a := <-answers; !strings.HasPrefix(a, "200 <nil> [") {
			t.Errorf("a request in flight was answered with %q", a)
		}
	}
	if err := service.Wait(time.Minute); err != nil {
		t.Errorf("service: %v\n%s", err, service.Log())
	}
	broker.Signal(syscall.SIGTERM)
}

func addressOf(t *testing.T, service *testbed.Process) (address string) {
	t.Helper()
	if err := testbed.Eventually(time.Minute, func() error {
		_, after, found := strings.Cut(service.Log(), "listening on ")
		if address, _, _ = strings.Cut(after, "\n"); !found || address == "" {
			return errors.New("the service does not listen: " + service.Log())
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return address
}

func askTheService(t *testing.T, service *testbed.Process) {
	address := addressOf(t, service)
	for body, want := range map[string]string{
		"[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15]": "200 [1,3,5,7,9,11,13,15,17,19,21,23,25,27,29,31]",
		"[1,2]": "400 ",
		"none":  "400 ",
	} {
		r, err := http.Post("http://"+address, "application/json", strings.NewReader(body))
		must.Do(t, err)
		answer, err := io.ReadAll(r.Body)
		r.Body.Close()
		if got := fmt.Sprint(r.StatusCode, " ", string(answer)); err != nil || !strings.HasPrefix(got, want) {
			t.Errorf("%s was answered with %q, %v; not %q", body, got, err, want)
		}
	}
}
