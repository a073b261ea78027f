// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/stats"
)

// fakeMPS stands in for nvidia-cuda-mps-control: it answers, and keeps a book of the clients
// that it was to terminate while they lived. With HANG it does not come back from that.
const fakeMPS = `#!/bin/sh
pipe=${CUDA_MPS_PIPE_DIRECTORY:?}
if [ "$1" = -d ]; then : > "$pipe/control"; exit 0; fi
read command server client
case "$command" in
get_server_list) echo 4242 ;;
get_server_status) echo ACTIVE ;;
terminate_client) kill -0 $client && echo "$server $client" >> BOOK; HANG ;;
quit) rm "$pipe/control" ;;
esac
`

// A client of MPS that is killed while a kernel of it runs breaks all the others.
func TestUnderMPSTheKernelsOfAWorkerAreEndedBeforeItIsKilled(t *testing.T) {
	for kind, hang := range map[string]string{"MPS answers": "", "MPS hangs": "exec sleep 1000"} {
		t.Run(kind, func(t *testing.T) {
			dir := t.TempDir()
			book := filepath.Join(dir, "book")
			script := strings.NewReplacer("BOOK", book, "HANG", hang).Replace(fakeMPS)
			if err := os.WriteFile(filepath.Join(dir, "nvidia-cuda-mps-control"), []byte(script), 0o700); err != nil {
				t.Fatal(err)
			}
			t.Setenv("PATH", dir+":/usr/bin:/bin")
			t.Setenv("CUDA_MPS_PIPE_DIRECTORY", filepath.Join(dir, "none"))
			s := serve(t, func(c *Config) { c.MPS = true }, worker())
			first := s.until("the worker attaches", attached(1)).Models[0].Workers[0].Pid
			stage := s.b.models.list()[0].ring.stages[0]
			stage.loop.do(func() { stage.kill(stage.workers[0], "it is to be killed") })
			s.until("another one attaches", func(st stats.Broker) bool {
				return attached(1)(st) && st.Models[0].Workers[0].Pid != first
			})
			if text, _ := os.ReadFile(book); string(text) != fmt.Sprintf("4242 %d\n", first) {
				t.Errorf("terminated: %q, want worker %d", text, first)
			}
		})
	}
}

// Clients of a ring in device memory that was lost attach again; the next worker brings new.
func TestDeviceMemoryThatWasLostIsGivenUp(t *testing.T) {
	s := serve(t, nil)
	r := s.b.models.list()[0].ring
	file, err := os.Open(os.DevNull) // as good as a driver's for the broker
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	r.loop.do(func() { r.device.fd = dup(int(file.Fd())) })
	c, err := attach.Open(t.Context(), s.b.Socket(), shm.Memfd{}, &control.Request{Op: control.OpClient, Model: "m", Window: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s.b.super.Faulted()
	c.Gone() // returns when the broker has hung up
	r.loop.do(func() {
		if r.device.fd >= 0 || len(r.clients) > 0 {
			t.Errorf("it has descriptor %d and %d clients", r.device.fd, len(r.clients))
		}
	})
}
