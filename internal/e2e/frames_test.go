// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/binary"
	"strings"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/status"
)

// The first tries of a client in another language look like these.
func TestAControlFrameOfOtherTypesIsRefusedWithAReason(t *testing.T) {
	h := newHost(t, theModel)
	for what, body := range map[string]string{
		"no map":             "\x01",
		"a list":             "\x91\x02",
		"a text as a number": "\x82\xa7version" + string(rune(control.Version)) + "\xa6window\xa216",
		"a float as version": "\x81\xa7version\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00",
		"nested maps":        "\x81\xa4what" + strings.Repeat("\x81\x01", control.MaxRequest/2-4) + "\xc0", // internal/control bounds the memory
	} {
		rep, err := sendRaw(h, body)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if status.Code(rep.Code) != status.ErrProtocol || !strings.Contains(rep.Message, control.ErrFrame.Error()) {
			t.Errorf("%s: %d %q", what, rep.Code, rep.Message)
		}
	}
	h.settled()
}

// sendRaw sends a frame with any body and returns what the broker answers.
func sendRaw(h *host, body string) (rep control.Reply, err error) {
	conn, err := attach.Dial(h.t.Context(), h.socket)
	if err != nil {
		return rep, err
	}
	defer conn.Close()
	_ = conn.SetWriteDeadline(time.Now().Add(patience))
	frame := binary.LittleEndian.AppendUint32(nil, uint32(len(body)))
	if _, err := conn.Write(append(frame, body...)); err != nil {
		return rep, err
	}
	_, err = control.Receive(conn, time.Now().Add(patience), &rep)
	return rep, err
}
