// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/internal/testbed"
	"github.com/ringbatch/ringbatch/shm"
)

func TestASlotOfAPrivateModelIsClearedBeforeAnotherHasIt(t *testing.T) {
	m := theModel
	m.Private = true
	h := newHost(t, m)
	h.worker(m)
	first := h.dial(client.WithWindow(4))
	const secret = int64(0x5ec4e75ec4e75ec4)
	x := make([]int64, 2*testbed.Width)
	for i := range x {
		x[i] = secret
	}
	must.Do(t, testbed.Ask(background(t), first, x, testbed.Width))
	failed := askLater(background(t), first, cmdFail, secret) // whose reason is on the board
	failed.ends(t, client.ErrFailed)
	first.Close()
	h.settled() // its window is back
	s, err := attach.Open(t.Context(), h.socket, shm.Memfd{}, &control.Request{Op: control.OpClient, Model: "m", Window: 8})
	must.Do(t, err)
	defer s.Close()
	for what, mem := range map[string][]byte{"planes": s.Planes.Bytes(), "board": s.BoardSeg.Bytes()} {
		for _, number := range []int64{secret, testbed.Answer(secret, 0)} {
			if i := bytes.Index(mem, binary.NativeEndian.AppendUint64(nil, uint64(number))); i >= 0 {
				t.Errorf("the former client's %#x is in the %s, at %d", number, what, i)
			}
		}
		if bytes.Contains(mem, []byte("told to fail")) {
			t.Errorf("the reason of its failure is in the %s", what)
		}
	}
}
