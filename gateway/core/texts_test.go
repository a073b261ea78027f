// SPDX-License-Identifier: Apache-2.0

package core_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/worker"
)

// elements are texts as the protocol's binary data has them.
func elements(texts ...string) (b []byte) {
	for _, text := range texts {
		b = append(append(b, byte(len(text)), byte(len(text)>>8), 0, 0), text...)
	}
	return b
}

func texts(data []byte) (all []string) {
	oip.Texts(data, func(text []byte) { all = append(all, string(text)) })
	return all
}

// textRig serves echo, one text a row, and pair, which turns two texts round.
func textRig(t *testing.T, change func(*core.Config)) *rig {
	t.Helper()
	one := modelConfig(t, "one", []string{"x:str[<=12]"}, []string{"y:str[<=12]"})
	pair := modelConfig(t, "pair", []string{"x:str[2,<=12]"}, []string{"y:str[2,<=12]"})
	r := newRig(t, change, one, pair)
	r.worker(one, echo)
	r.worker(pair, func(_ context.Context, b *worker.Batch) error {
		for i := range b.Rows() {
			both := b.Input(0).Texts(i)
			b.Output(0).SetTexts(i, both[1], both[0])
		}
		return nil
	})
	return r
}

var someTexts = []string{"hi", "", "grüße", "123456789012", "a\x00b", "\"\\\n<"}

func TestTextsGoBothWays(t *testing.T) {
	t.Parallel()
	r := textRig(t, nil)
	data, err := json.Marshal(someTexts)
	must.Do(t, err)
	a := r.infer("one", fmt.Sprintf(`{"inputs":[{"name":"x","shape":[6],"datatype":"BYTES","data":%s}]}`, data))
	a.is(t, "JSON", 200)
	back, _ := json.Marshal(a.Outputs[0].Data)
	if string(back) != string(data) || a.Outputs[0].Datatype != "BYTES" || !slices.Equal(a.Outputs[0].Shape, []int{6}) {
		t.Errorf("%s, %+v", back, a.Outputs[0])
	}
	bin := elements(someTexts...)
	head := fmt.Sprintf(`{"inputs":[{"name":"x","shape":[3,2],"datatype":"BYTES","parameters":{"binary_data_size":%d}}],`+
		`"parameters":{"binary_data_output":true}}`, len(bin))
	a = r.inferBinary("pair", head, bin)
	a.is(t, "binary", 200)
	want := []string{"", "hi", "123456789012", "grüße", "\"\\\n<", "a\x00b"}
	if got := texts(a.raw); !slices.Equal(got, want) || !slices.Equal(a.Outputs[0].Shape, []int{3, 2}) {
		t.Errorf("%q, %+v", got, a.Outputs[0])
	}
	a = r.infer("pair", `{"inputs":[{"name":"x","shape":[1,2],"datatype":"BYTES","data":[["\u00fc","b"]]}]}`)
	if a.is(t, "nested", 200); !slices.Equal(a.Outputs[0].Data, []any{"b", "ü"}) {
		t.Errorf("%q", a.Outputs[0].Data)
	}
	a = r.post("/v2/models/one/infer", map[string]string{headerLength: "0"}, []byte("grüße"))
	if a.is(t, "the body is the text", 200); !slices.Equal(texts(a.raw), []string{"grüße"}) {
		t.Errorf("%q", a.raw)
	}

	in := &oip.ModelInferRequest_InferInputTensor{Name: "x", Datatype: "BYTES", Shape: []int64{3, 2}}
	rep, err := r.client().ModelInfer(soon(t), &oip.ModelInferRequest{ModelName: "pair",
		Inputs: []*oip.ModelInferRequest_InferInputTensor{in}, RawInputContents: [][]byte{bin}})
	must.Do(t, err)
	if got := texts(rep.RawOutputContents[0]); !slices.Equal(got, want) || rep.Outputs[0].Datatype != "BYTES" {
		t.Errorf("%q, %v", got, rep.Outputs[0])
	}
	in.Contents = &oip.InferTensorContents{}
	for _, text := range someTexts {
		in.Contents.BytesContents = append(in.Contents.BytesContents, []byte(text))
	}
	rep, err = r.client().ModelInfer(soon(t), &oip.ModelInferRequest{ModelName: "pair",
		Inputs: []*oip.ModelInferRequest_InferInputTensor{in}})
	must.Do(t, err)
	if got := texts(rep.RawOutputContents[0]); !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	meta, err := r.client().ModelMetadata(soon(t), &oip.ModelMetadataRequest{Name: "pair"})
	must.Do(t, err)
	if x := meta.Inputs[0]; x.Datatype != "BYTES" || !slices.Equal(x.Shape, []int64{-1, 2}) {
		t.Errorf("%v", x)
	}
	r.idle()
}

func TestMoreTextsThanABatchHasAreSplit(t *testing.T) {
	t.Parallel()
	r := textRig(t, nil)
	var many []string
	for i := range 50 {
		many = append(many, strings.Repeat("x", i%12))
	}
	data, err := json.Marshal(many)
	must.Do(t, err)
	a := r.infer("one", fmt.Sprintf(`{"inputs":[{"name":"x","shape":[50],"datatype":"BYTES","data":%s}]}`, data))
	a.is(t, "50 texts", 200)
	if back, _ := json.Marshal(a.Outputs[0].Data); string(back) != string(data) {
		t.Errorf("%s", back)
	}
	bin := elements(many...)
	a = r.inferBinary("one", fmt.Sprintf(`{"inputs":[{"name":"x","shape":[50],"datatype":"BYTES","parameters":{"binary_data_size":%d}}],`+
		`"parameters":{"binary_data_output":true}}`, len(bin)), bin)
	if a.is(t, "50 binary texts", 200); !slices.Equal(texts(a.raw), many) {
		t.Errorf("%q", texts(a.raw))
	}
	r.idle()
}

func TestWhatIsNoTextIsRefused(t *testing.T) {
	t.Parallel()
	r := textRig(t, nil)
	input := func(rest string) string { return `{"inputs":[{"name":"x","datatype":"BYTES",` + rest + `}]}` }
	for _, c := range []struct{ name, body, reason string }{
		{"a number", input(`"shape":[1],"data":[7]`), "want a string"},
		{"null", input(`"shape":[1],"data":[null]`), "want a string"},
		{"too long", input(`"shape":[2],"data":["a","1234567890123"]`), "13 bytes, at most 12"},
		{"not UTF-8", input(`"shape":[1],"data":["` + "\xc3(" + `"]`), "bad UTF-8"},
		{"half a character", input(`"shape":[1],"data":["\ud800"]`), "bad UTF-8"},
		{"too few", input(`"shape":[2],"data":["a"]`), "has more"},
		{"too many", input(`"shape":[1],"data":["a","b"]`), "more than the 1"},
		{"another shape", input(`"shape":[1,1],"data":["a"]`), "has shape [-1], got [1 1]"},
		{"no shape", input(`"data":["a"]`), "shape"},
		{"numbers", `{"inputs":[{"name":"x","shape":[1],"datatype":"UINT8","data":[1]}]}`, "is BYTES, got UINT8"},
	} {
		r.infer("one", c.body).is(t, c.name, 400, c.reason)
	}
	for name, c := range map[string]struct {
		data   []byte
		reason string
	}{
		"too long":       {elements("1234567890123"), "13 bytes, at most 12"},
		"not UTF-8":      {elements("\xc3("), "not UTF-8"},
		"cut":            {elements("abc")[:6], "are left"},
		"no length":      {[]byte("ab"), "end inside"},
		"something more": {elements("a", "b"), "behind its last text"},
	} {
		head := fmt.Sprintf(`{"inputs":[{"name":"x","shape":[1],"datatype":"BYTES","parameters":{"binary_data_size":%d}}]}`, len(c.data))
		r.inferBinary("one", head, c.data).is(t, name, 400, c.reason)
		_, err := r.client().ModelInfer(soon(t), &oip.ModelInferRequest{ModelName: "one", RawInputContents: [][]byte{c.data},
			Inputs: []*oip.ModelInferRequest_InferInputTensor{{Name: "x", Datatype: "BYTES", Shape: []int64{1}}}})
		if err == nil || !strings.Contains(err.Error(), c.reason) {
			t.Errorf("%s: %v", name, err)
		}
	}
	r.post("/v2/models/one/infer", map[string]string{headerLength: "0"}, []byte("1234567890123")).is(t, "a long body", 400, "at most 12")
	r.idle()
}
