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

// costlyFrames are as large as a frame may be, and would become many times
// that once decoded.
func costlyFrames() map[string]string {
	const most = control.MaxRequest
	many := func(before, value string) string {
		n := (most - len(before) - 5) / len(value)
		return before + "\xdd" + string(binary.BigEndian.AppendUint32(nil, uint32(n))) + strings.Repeat(value, n)
	}
	return map[string]string{
		"nested arrays": "\x81\xa4what" + strings.Repeat("\x91", most-7) + "\xc0",
		"nested maps":   "\x81\xa4what" + strings.Repeat("\x81\x01", most/2-4) + "\xc0",
		"levels":        many("\x81\xa6policy\x81\xa6levels", "\xc0"),
		"buckets":       many("\x81\xa6policy\x81\xa7buckets", "\x91\x01"),
	}
}

func TestACostlyControlFrameIsRefusedAtOnceWithAReason(t *testing.T) {
	h := newHost(t, theModel)
	w, c := h.worker(theModel), h.dial()
	works(t, c, 3)
	before := usageOf(t, h.broker.Pid()).Peak
	for what, body := range costlyFrames() {
		for range 5 {
			start := time.Now()
			rep, err := sendRaw(h, body)
			if err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			if status.Code(rep.Code) != status.ErrProtocol || !strings.Contains(rep.Message, control.ErrFrame.Error()) {
				t.Errorf("%s: %d %q", what, rep.Code, rep.Message)
			}
			if took := time.Since(start); took > patience/2 {
				t.Errorf("%s: refused after %v", what, took)
			}
		}
	}
	// A frame is read into a buffer that doubles; garbage of a few of them
	// may be there at once.
	more := usageOf(t, h.broker.Pid()).Peak - before
	t.Logf("the broker took %d MiB at most", more>>20)
	if more > 16<<20 {
		t.Errorf("the broker took %d MiB for frames of 256 KiB", more>>20)
	}
	works(t, c, 3)
	c.Close()
	w.Kill()
	h.settled()
}

// The first tries of a client in another language look like these.
func TestAControlFrameOfOtherTypesIsRefusedWithAReason(t *testing.T) {
	h := newHost(t, theModel)
	for what, body := range map[string]string{
		"no map":             "\x01",
		"a list":             "\x91\x02",
		"a text as a number": "\x82\xa7version" + string(rune(control.Version)) + "\xa6window\xa216",
		"a float as version": "\x81\xa7version\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00",
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
