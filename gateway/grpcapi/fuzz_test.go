// SPDX-License-Identifier: Apache-2.0

package grpcapi

import (
	"bytes"
	"testing"

	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/test/gatecall"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
)

func FuzzMessage(f *testing.F) {
	for _, m := range []*oip.ModelInferRequest{
		{ModelName: "m", Id: "i", ModelVersion: "1", Inputs: []*oip.ModelInferRequest_InferInputTensor{rpcInput("x", "FP32", 1, 2),
			rpcInput("v", "INT16", 1, 3)}, RawInputContents: [][]byte{[]byte("12345678"), []byte("123456")}},
		{ModelName: "m", Inputs: []*oip.ModelInferRequest_InferInputTensor{{Name: "x", Datatype: "FP32", Shape: []int64{1, 2},
			Contents: &oip.InferTensorContents{Fp32Contents: []float32{1, 2}}}},
			Parameters: map[string]*oip.InferParameter{"priority": {ParameterChoice: &oip.InferParameter_Uint64Param{Uint64Param: 1}},
				"s": {ParameterChoice: &oip.InferParameter_StringParam{StringParam: "t"}}},
			Outputs: []*oip.ModelInferRequest_InferRequestedOutputTensor{{Name: "y", Parameters: map[string]*oip.InferParameter{
				"classification": {ParameterChoice: &oip.InferParameter_Int64Param{Int64Param: 0}}}}}},
	} {
		b, err := proto.Marshal(m)
		must.Do(f, err)
		for _, cut := range []byte{1, 7, 255} {
			f.Add(b, cut)
		}
	}
	f.Add([]byte{0x3a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f}, byte(3))
	f.Add([]byte{0x2a, 0x02, 0x1a}, byte(1))
	k := gatecall.Lone(f)
	f.Fuzz(func(t *testing.T, data []byte, cut byte) {
		m := &oip.Request{} // in parts, as a transport has it
		for rest := data; len(rest) > 0; {
			n := min(len(rest), max(1, int(cut)))
			m.Data = append(m.Data, mem.SliceBuffer(rest[:n]))
			rest = rest[n:]
		}
		c := core.NewCall(k, nil, &core.Caller{Peer: &core.Peer{}, Use: &core.Usage{}})
		defer c.Done()
		err := m.Split()
		gatecall.Named(t, err)
		if err != nil {
			return
		}
		var want oip.ModelInferRequest
		if proto.Unmarshal(data, &want) == nil {
			if string(m.Model) != want.ModelName || string(m.ID) != want.Id || len(m.Raw) != len(want.RawInputContents) ||
				len(m.Inputs) != len(want.Inputs) {
				t.Fatalf("%q %q, not %v", m.Model, m.ID, &want)
			}
			for i, w := range want.RawInputContents {
				got, s := make([]byte, len(w)), m.Raw[i]
				if s.Size() != len(w) || s.ReadFull(got) != nil || !bytes.Equal(got, w) {
					t.Fatalf("raw %d: %q, not %q", i, got, w)
				}
			}
		}
		if err = (rpcCall{c}).readMessage(m); err == nil {
			if err = c.Check(); err == nil {
				_, err = gatecall.ReadAll(c)
			}
		}
		gatecall.Named(t, err)
	})
}
