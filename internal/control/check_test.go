// SPDX-License-Identifier: Apache-2.0

package control

import (
	"encoding/binary"
	"errors"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/ringbatch/ringbatch/internal/must"
)

// Each of these made the decoder ask for memory by the gigabyte.
func TestAFewBytesCannotAskForMuchMemory(t *testing.T) {
	huge := "\xff\xff\xff\xff"
	for what, body := range map[string]string{
		"policy":    "\x81\xa6policy\xdf" + huge,
		"inputs":    "\x81\xa6worker\x81\xa6inputs\xdd" + huge,
		"model":     "\x81\xa5model\xdb" + huge,
		"stats":     "\x81\xa5stats\xc6" + huge,
		"models":    "\x81\xa6models\xdd" + huge,
		"depth":     "\x81\xa4what" + strings.Repeat("\x91", 1<<19) + "\xc0",
		"cut short": "\x82\xa5model",
		"no value":  "\xc1",
		"more":      "\x80\x80",
	} {
		got := allocated(func() {
			for _, msg := range []any{&Request{}, &Reply{}} {
				if err := Decode([]byte(body), msg); !errors.Is(err, ErrFrame) {
					t.Errorf("%s: %v", what, err)
				}
			}
		})
		if got > 2<<20 {
			t.Errorf("%s: %d bytes of memory", what, got)
		}
	}
}

// wide is a message whose arrays are as long as a frame allows: each value
// takes one byte there, and up to 80 once it is decoded.
func wide(before, value string) string {
	n := (MaxRequest - len(before) - 5) / len(value)
	return before + "\xdd" + string(binary.BigEndian.AppendUint32(nil, uint32(n))) + strings.Repeat(value, n)
}

var wideRequests = map[string]string{
	"inputs":  wide("\x81\xa6worker\x81\xa6inputs", "\xa0"),
	"unknown": wide("\x81\xa4what", "\x90"),
}

func TestAFullFrameCannotAskForMuchMemory(t *testing.T) {
	for what, body := range wideRequests {
		err := Decode([]byte(body), &Request{})
		if !errors.Is(err, ErrFrame) || !strings.Contains(err.Error(), "values") {
			t.Errorf("%s: %v", what, err)
		}
		if got := allocated(func() { _ = Decode([]byte(body), &Request{}) }); got > 2<<20 {
			t.Errorf("%s: %d bytes of memory", what, got)
		}
	}
}

func TestARequestWithManyValuesIsRead(t *testing.T) {
	r := Request{Op: OpWorker, Policy: map[string]string{}}
	for i := range 4_000 {
		r.Policy[strconv.Itoa(i)] = "1"
	}
	body, err := msgpack.Marshal(&r)
	must.Do(t, err)
	must.Check(t, Decode(body, &Request{}))
}

func TestALongListOfModelsIsRead(t *testing.T) {
	models := make([]Model, 10_000)
	body, err := msgpack.Marshal(&Reply{Models: models})
	must.Do(t, err)
	if len(body) > MaxFrame {
		t.Fatalf("%d bytes", len(body))
	}
	var got Reply
	if err := Decode(body, &got); err != nil || len(got.Models) != len(models) {
		t.Errorf("%d models, %v", len(got.Models), err)
	}
}

func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}
