// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/broker/engine"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
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
			must.Do(t, os.WriteFile(filepath.Join(dir, "nvidia-cuda-mps-control"), []byte(script), 0o700))
			t.Setenv("PATH", dir+":/usr/bin:/bin")
			t.Setenv("CUDA_MPS_PIPE_DIRECTORY", filepath.Join(dir, "none"))
			s := serve(t, func(c *Config) { c.MPS = true }, worker())
			first := s.until("the worker attaches", attached(1)).Models[0].Workers[0].Pid
			pidfd, err := unix.PidfdOpen(first, 0)
			must.Do(t, err)
			p := engine.NewPeer(nil, first, os.Getuid(), engine.Process{}, pidfd, "worker")
			defer p.Discard()
			must.Do(t, (outside{s.b}).Kill(p, false))
			s.until("another one attaches", func(st stats.Broker) bool {
				return attached(1)(st) && st.Models[0].Workers[0].Pid != first
			})
			if text, _ := os.ReadFile(book); string(text) != fmt.Sprintf("4242 %d\n", first) {
				t.Errorf("terminated: %q, want worker %d", text, first)
			}
		})
	}
}

// say sends a request, and the descriptor if there is one, on a connection that lasts as
// long as the test.
func say(t *testing.T, socket string, req *control.Request, offer int) (*net.UnixConn, control.Reply) {
	t.Helper()
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
	must.Do(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	deadline := time.Now().Add(patience)
	req.Version = control.Version
	var rep control.Reply
	if err = control.Send(conn, deadline, req); err == nil && offer >= 0 {
		err = control.SendOffer(conn, deadline, offer)
	}
	must.Do(t, err)
	fds, err := control.ReceiveReply(conn, deadline, &rep)
	must.Do(t, err)
	control.CloseFDs(fds)
	return conn, rep
}

// Clients of a ring in device memory that was lost attach again; the next worker brings new.
func TestDeviceMemoryThatWasLostIsGivenUp(t *testing.T) {
	s := serve(t, nil)
	file, err := os.Open(os.DevNull) // as good as a driver's for the broker
	must.Do(t, err)
	defer file.Close()
	info := &control.WorkerInfo{Inputs: []string{"x:f32[4]@device"}, Outputs: []string{"y:f32[4]"}, Depth: 1}
	_, rep := say(t, s.b.Socket(), &control.Request{Op: control.OpWorker, Model: "d", Worker: info, GPU: "GPU-0"}, int(file.Fd()))
	if rep.Code != 0 || rep.Attached == nil {
		t.Fatalf("the worker is refused: %s", rep.Message)
	}
	client := control.Request{Op: control.OpClient, Model: "d", Window: 1, Device: true}
	c, rep := say(t, s.b.Socket(), &client, -1)
	if rep.Code != 0 || rep.Attached == nil {
		t.Fatalf("the client is refused: %s", rep.Message)
	}
	s.b.super.Faulted()
	_ = c.SetReadDeadline(time.Now().Add(patience))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("the client's connection: %v", err)
	}
	if _, rep = say(t, s.b.Socket(), &client, -1); rep.Code != uint8(status.ErrNoWorker) {
		t.Errorf("another client: %d %s", rep.Code, rep.Message)
	}
}
