// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"bytes"
	"encoding/json"
	"errors"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
)

// lone is a model of a gateway that serves nobody.
func lone(t testing.TB) *model {
	g, err := newCore(Config{MaxMessageBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	k := &model{g: g, name: "m", sig: signature(t, []string{"x:f32[2]", "v:i16[<=3]"}, []string{"y:f32[2]"})}
	s, err := policy.Policy{}.Resolve(k.sig.Inputs)
	if err != nil {
		t.Fatal(err)
	}
	k.info.Store(&modelInfo{settings: &s})
	return k
}

// drain reads a checked call's sources as run would, into memory of its own.
func (c *call) drain() ([][]byte, error) {
	all := make([][]byte, len(c.inputs))
	for i := range c.inputs {
		in := &c.inputs[i]
		size := in.dtype.Size()
		for _, d := range in.shape {
			size *= d
		}
		all[i] = make([]byte, size)
		if err := in.src.ReadFull(all[i]); err != nil {
			return nil, err
		}
	}
	return all, c.finishSources()
}

// named makes sure that an error is one that a caller can be told.
func named(t *testing.T, err error) {
	var r *refusal
	var code status.Code
	if err != nil && !errors.As(err, &r) && !errors.As(err, &code) {
		t.Errorf("an error without a meaning: %v", err)
	}
}

var requestSeeds = []string{
	`{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2]},{"name":"v","shape":[1,3],"datatype":"INT16","data":[[1,2,3]]}]}`,
	`{"id":"a\"\u00e4","parameters":{"priority":1,"timeout":5,"binary_data_output":true,"z":[{}]},"inputs":[{"name":"x","shape":[2,2],"datatype":"FP32","data":[NaN,1e-3,-0,Infinity]},{"name":"v","shape":[2,0],"datatype":"INT16","data":[]}],"outputs":[{"name":"y","parameters":{"binary_data":true}}]}`,
	`{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","parameters":{"shared_memory_region":"r","shared_memory_byte_size":8,"shared_memory_offset":1}}]}`,
	`{"inputs":[`, `{"a":[[[[]]]]}`, `{}`, ``, `[]`, `{"inputs":null}`, "{\"\\ud800\":1}",
}

func FuzzJSONRequest(f *testing.F) {
	for _, s := range requestSeeds {
		f.Add([]byte(s))
	}
	k := lone(f)
	f.Fuzz(func(t *testing.T, text []byte) {
		c := newCall()
		defer c.done()
		c.model, c.caller = k, &caller{peer: &peer{}, use: &usage{}}
		_, err := (httpCall{c}).readJSON(text, nil)
		named(t, err)
		if err != nil {
			return
		}
		plain := bytes.ReplaceAll(bytes.ReplaceAll(text, []byte("Infinity"), []byte("0")), []byte("NaN"), []byte("0"))
		if !json.Valid(plain) {
			t.Errorf("%q was taken for JSON", text)
		}
		if err = c.check(); err == nil {
			_, err = c.drain()
		}
		named(t, err)
	})
}

func FuzzBinaryBody(f *testing.F) {
	head := `{"inputs":[{"name":"v","shape":[1,3],"datatype":"INT16","parameters":{"binary_data_size":6}},{"name":"x","shape":[1,2],"datatype":"FP32","parameters":{"binary_data_size":8}}]}`
	f.Add(strconv.Itoa(len(head)), []byte(head+"12345678901234"), true)
	f.Add(strconv.Itoa(len(head)), []byte(head+"1234567890123"), false)
	f.Add("0", []byte("12345678"), true)
	f.Add("-1", []byte("{}"), true)
	f.Add("99999999999999999999", []byte("{}"), false)
	for _, s := range requestSeeds {
		f.Add(strconv.Itoa(len(s)), []byte(s), true)
		f.Add("", []byte(s), false)
	}
	k := lone(f)
	f.Fuzz(func(t *testing.T, header string, text []byte, known bool) {
		length := int64(-1)
		if known {
			length = int64(len(text))
		}
		b := &body{}
		c := newCall()
		defer c.done()
		c.model, c.caller = k, &caller{peer: &peer{}, use: &usage{}}
		err := b.open(httpCall{c}, bytes.NewReader(text), length, "")
		if err == nil {
			defer b.close()
			err = b.read(httpCall{c}, header)
		}
		if err == nil {
			err = c.check()
		}
		var got [][]byte
		if err == nil {
			got, err = c.drain()
		}
		named(t, err)
		if err == nil && header != "" { // what was read is the end of the body, all of it
			if all := bytes.Join(got, nil); !bytes.HasSuffix(text, all) && !strings.Contains(string(text), `"data"`) {
				t.Errorf("%q: %q", text, all)
			}
		}
		if n := k.g.limits.used.Load() - int64(c.taken); n != 0 {
			t.Errorf("%d bytes of the budget", n)
		}
	})
}

func FuzzMessage(f *testing.F) {
	for _, m := range []*oip.ModelInferRequest{
		{ModelName: "m", Id: "i", ModelVersion: "1", Inputs: []*oip.ModelInferRequest_InferInputTensor{rpcInput("x", "FP32", 1, 2), rpcInput("v", "INT16", 1, 3)}, RawInputContents: [][]byte{[]byte("12345678"), []byte("123456")}},
		{ModelName: "m", Inputs: []*oip.ModelInferRequest_InferInputTensor{{Name: "x", Datatype: "FP32", Shape: []int64{1, 2}, Contents: &oip.InferTensorContents{Fp32Contents: []float32{1, 2}}}},
			Parameters: map[string]*oip.InferParameter{"priority": {ParameterChoice: &oip.InferParameter_Uint64Param{Uint64Param: 1}}, "s": {ParameterChoice: &oip.InferParameter_StringParam{StringParam: "t"}}},
			Outputs:    []*oip.ModelInferRequest_InferRequestedOutputTensor{{Name: "y", Parameters: map[string]*oip.InferParameter{"classification": {ParameterChoice: &oip.InferParameter_Int64Param{Int64Param: 0}}}}}},
	} {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		for _, cut := range []byte{1, 7, 255} {
			f.Add(b, cut)
		}
	}
	f.Add([]byte{0x3a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f}, byte(3))
	f.Add([]byte{0x2a, 0x02, 0x1a}, byte(1))
	k := lone(f)
	f.Fuzz(func(t *testing.T, data []byte, cut byte) {
		m := &oip.Request{} // in parts, as a transport has it
		for rest := data; len(rest) > 0; {
			n := min(len(rest), max(1, int(cut)))
			m.Data = append(m.Data, mem.SliceBuffer(rest[:n]))
			rest = rest[n:]
		}
		c := newCall()
		defer c.done()
		c.model, c.caller = k, &caller{peer: &peer{}, use: &usage{}}
		err := m.Split()
		named(t, err)
		if err != nil {
			return
		}
		var want oip.ModelInferRequest
		if proto.Unmarshal(data, &want) == nil {
			if string(m.Model) != want.ModelName || string(m.ID) != want.Id || len(m.Raw) != len(want.RawInputContents) || len(m.Inputs) != len(want.Inputs) {
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
			if err = c.check(); err == nil {
				_, err = c.drain()
			}
		}
		named(t, err)
	})
}
