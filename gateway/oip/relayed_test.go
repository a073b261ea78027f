// SPDX-License-Identifier: Apache-2.0

package oip

import (
	"reflect"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"github.com/ringbatch/ringbatch/internal/must"
)

func TestRequestsAreReadAsTheyWereWritten(t *testing.T) {
	b := AppendRequest(nil, 1, 0, []uint32{7, 0})
	b = AppendRequest(b, 32, 4500*time.Microsecond, []uint32{512, 3})
	got, err := ParseRequests(nil, b, 2)
	want := []RelayedRequest{{Rows: 1}, {Rows: 32, Timeout: 4500 * time.Microsecond}}
	want[0].Dims[0], want[1].Dims[0], want[1].Dims[1] = 7, 512, 3
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%s was read as %+v, %v", b, got, err)
	}
	for _, bad := range []string{"", "0", "1;", "1@", "1@0", "1x2x3", "x2", "1@5;2,3", "99999999999999999999", "-1", "1x5;1x"} {
		if got, err := ParseRequests(nil, []byte(bad), 1); err == nil {
			t.Errorf("%q was read as %+v", bad, got)
		}
	}
}

func TestFailuresAreReadAsTheyWereWritten(t *testing.T) {
	b := AppendFailed(nil, 3, "WorkerDied", "")
	b = AppendFailed(b, 17, "Failed", "no such\nword: é")
	var got []any
	if err := ParseFailed(string(b), func(i int, name, text string) { got = append(got, i, name, text) }); err != nil {
		t.Fatal(err)
	}
	if want := []any{3, "WorkerDied", "", 17, "Failed", "no such word: é"}; !reflect.DeepEqual(got, want) {
		t.Errorf("%q was read as %v", b, got)
	}
	if ParseFailed("x Failed", func(int, string, string) {}) == nil {
		t.Error("a line without an index was read")
	}
}

func TestSizesAreReadAsTheyWereWritten(t *testing.T) {
	b := AppendSizes(nil, true, true, []uint32{5, 1})
	b = AppendSizes(b, false, false, []uint32{6, 0})
	b = AppendSizes(b, true, false, []uint32{7, 2})
	var got [][]int
	err := ParseSizes(string(b), 2, func(d []int) error { got = append(got, []int{d[0], d[1]}); return nil })
	if want := [][]int{{5, 1}, {6, 0}, {7, 2}}; err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%s was read as %v, %v", b, got, err)
	}
	if ParseSizes("5", 2, func([]int) error { return nil }) == nil {
		t.Error("a row with a size missing was read")
	}
}

func TestALoadReportIsReadAsItWasWritten(t *testing.T) {
	want := Load{Utilization: 1.5, PerSecond: 3200, Queue: 4 * time.Millisecond, Compute: 250 * time.Microsecond}
	got, ok := ParseLoad(want.Append(nil))
	if !ok || got != want {
		t.Errorf("%+v was read as %+v", want, got)
	}
	if _, ok := ParseLoad([]byte{0xff}); ok {
		t.Error("rubbish was read")
	}
}

// FuzzRequests looks for a text that makes the parsers misbehave.
func FuzzRequests(f *testing.F) {
	f.Add([]byte("1@5x3;2x9"), 1)
	f.Fuzz(func(_ *testing.T, text []byte, sizes int) {
		_, _ = ParseRequests(nil, text, min(max(sizes, 0), 8))
		_ = ParseFailed(string(text), func(int, string, string) {})
		_ = ParseSizes(string(text), min(max(sizes, 1), 8), func([]int) error { return nil })
		ParseLoad(text)
	})
}

func TestAMessageThatIsCutOffInItsLastFieldIsRefused(t *testing.T) {
	whole, err := proto.Marshal(&ModelInferRequest{ModelName: "double", RawInputContents: [][]byte{make([]byte, 16)}})
	must.Do(t, err)
	for name, tail := range map[string][]byte{
		"a varint":       {100<<3&0x7f | 0x80, 100 >> 4, 0x80},
		"a fixed32":      {100<<3&0x7f | 0x80 | 5, 100 >> 4, 1, 2, 3},
		"a fixed64":      {100<<3&0x7f | 0x80 | 1, 100 >> 4, 1, 2, 3, 4, 5, 6, 7},
		"bytes":          {100<<3&0x7f | 0x80 | 2, 100 >> 4, 4, 1, 2, 3},
		"a tag":          {0x80},
		"a length":       {100<<3&0x7f | 0x80 | 2, 100 >> 4, 0x80},
		"no cut (valid)": nil,
	} {
		for _, parts := range []int{1, 2} { // as the transport may deliver it
			data := append(slices.Clone(whole), tail...)
			m := &Request{Data: mem.BufferSlice{mem.SliceBuffer(data)}}
			if parts == 2 {
				m.Data = mem.BufferSlice{mem.SliceBuffer(data[:len(whole)]), mem.SliceBuffer(data[len(whole):])}
			}
			if err := m.Split(); (err == nil) != (tail == nil) {
				t.Errorf("%s in %d parts: %v", name, parts, err)
			}
		}
	}
}
