// SPDX-License-Identifier: Apache-2.0

package oip

import (
	"slices"
	"testing"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"github.com/ringbatch/ringbatch/internal/must"
)

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
