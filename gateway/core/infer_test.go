// SPDX-License-Identifier: Apache-2.0

package core_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
	"google.golang.org/grpc/codes"
	rpcstatus "google.golang.org/grpc/status"
)

func floats(v ...float32) []byte {
	var b []byte
	for _, f := range v {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(f))
	}
	return b
}

func double(_ context.Context, b *worker.Batch) error {
	for i := range b.Rows() {
		x, y := worker.Row[float32](b.Input(0), i), worker.Row[float32](b.Output(0), i)
		for j := range x {
			y[j] = 2 * x[j]
		}
	}
	return nil
}

func doubler(t testing.TB) broker.ModelConfig {
	return modelConfig(t, "double", []string{"x:f32[4]"}, []string{"y:f32[4]"})
}

func rpcInput(name, datatype string, shape ...int64) *oip.ModelInferRequest_InferInputTensor {
	return &oip.ModelInferRequest_InferInputTensor{Name: name, Datatype: datatype, Shape: shape}
}

func TestAnAnswerIsTheSameByJSONBinaryAndGRPC(t *testing.T) {
	r := doublingRig(t, nil)
	want := floats(2, 4, -6, 0.5)

	a := r.infer("double", `{"id":"one","inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[1,2,-3,0.25]}]}`)
	if a.status != 200 || a.ID != "one" || a.Model != "double" || fmt.Sprint(a.Outputs[0].Data) != "[2 4 -6 0.5]" ||
		fmt.Sprint(a.Outputs[0].Shape) != "[1 4]" || a.Outputs[0].Datatype != "FP32" {
		t.Errorf("JSON: %+v", a)
	}
	a = r.inferBinary("double", `{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","parameters":{"binary_data_size":16}}],`+
		`"outputs":[{"name":"y","parameters":{"binary_data":true}}]}`, floats(1, 2, -3, 0.25))
	if a.status != 200 || !bytes.Equal(a.raw, want) || a.Outputs[0].Parameters["binary_data_size"] != 16.0 {
		t.Errorf("binary: %+v", a)
	}
	rep, err := r.client().ModelInfer(soon(t), &oip.ModelInferRequest{ModelName: "double", Id: "two",
		Inputs: []*oip.ModelInferRequest_InferInputTensor{rpcInput("x", "FP32", 1, 4)}, RawInputContents: [][]byte{floats(1, 2, -3, 0.25)}})
	must.Do(t, err)
	if rep.Id != "two" || rep.ModelName != "double" || len(rep.Outputs) != 1 || !slices.Equal(rep.Outputs[0].Shape, []int64{1, 4}) ||
		!bytes.Equal(rep.RawOutputContents[0], want) {
		t.Errorf("gRPC: %v", rep)
	}
	r.idle()
}

func TestABodyThatIsOneTensorNeedsNoJSON(t *testing.T) {
	r := doublingRig(t, nil)
	a := r.post("/v2/models/double/infer", map[string]string{headerLength: "0"}, floats(1, 2, 3, 4, 5, 6, 7, 8))
	if a.status != 200 || !bytes.Equal(a.raw, floats(2, 4, 6, 8, 10, 12, 14, 16)) {
		t.Errorf("%+v", a)
	}
}

// everyType has an input and an output of each element type.
func everyType(t testing.TB) (m broker.ModelConfig, values map[string]string) {
	values = map[string]string{"bool": "true,false", "u8": "0,255", "i8": "-128,127", "i16": "-32768,32767",
		"i32": "-2147483648,2147483647",
		"i64": "-9223372036854775808,9223372036854775807", "f16": "0.5,-65504", "bf16": "1,-2.5", "f32": "0.1,-1e-30", "f64": "0.1,1e300"}
	var in, out []string
	for _, d := range typeOrder {
		in, out = append(in, d+"_in:"+d+"[2]"), append(out, d+"_out:"+d+"[2]")
	}
	return modelConfig(t, "types", in, out), values
}

var typeOrder = []string{"bool", "u8", "i8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64"}

func wireName(t testing.TB, d string) string {
	dtype, err := tensor.ParseDType(d)
	must.Do(t, err)
	return oip.TypeName(dtype)
}

func TestEveryElementTypeGoesThroughUnchanged(t *testing.T) {
	m, values := everyType(t)
	r := newRig(t, nil, m)
	r.worker(m, echo)
	var parts []string
	for _, d := range typeOrder {
		parts = append(parts, fmt.Sprintf(`{"name":"%s_in","shape":[1,2],"datatype":"%s","data":[[%s]]}`, d, wireName(t, d), values[d]))
	}
	inputs := `"inputs":[` + strings.Join(parts, ",") + `]`
	a := r.infer("types", `{`+inputs+`}`)
	if a.status != 200 {
		t.Fatal(a.Error)
	}
	for i, o := range a.Outputs {
		var got []string
		for _, v := range o.Data {
			got = append(got, strings.TrimSuffix(fmt.Sprint(v), ".0"))
		}
		if o.Datatype != wireName(t, typeOrder[i]) || len(o.Data) != 2 {
			t.Errorf("%s: %+v", typeOrder[i], o)
		}
		if d := typeOrder[i]; d == "bool" || d == "u8" || d == "i16" || d == "f16" || d == "bf16" {
			if strings.Join(got, ",") != values[d] {
				t.Errorf("%s: %v, not %s", d, got, values[d])
			}
		}
	}
	// The same values in binary, and there every bit counts.
	binaryAnswer := r.infer("types", `{`+inputs+`,"parameters":{"binary_data_output":true}}`)
	var rpcInputs []*oip.ModelInferRequest_InferInputTensor
	var raw [][]byte
	rest := binaryAnswer.raw
	for i, o := range binaryAnswer.Outputs {
		n := int(o.Parameters["binary_data_size"].(float64))
		rpcInputs = append(rpcInputs, rpcInput(typeOrder[i]+"_in", o.Datatype, 1, 2))
		raw, rest = append(raw, rest[:n]), rest[n:]
	}
	if len(rest) != 0 || len(raw) != len(typeOrder) {
		t.Fatalf("%d bytes left over, %d outputs", len(rest), len(raw))
	}
	rep, err := r.client().ModelInfer(soon(t), &oip.ModelInferRequest{ModelName: "types", Inputs: rpcInputs, RawInputContents: raw})
	must.Do(t, err)
	for i := range raw {
		if !bytes.Equal(rep.RawOutputContents[i], raw[i]) {
			t.Errorf("%s: %x, not %x", typeOrder[i], rep.RawOutputContents[i], raw[i])
		}
	}
	if v := int64(binary.LittleEndian.Uint64(raw[5])); v != math.MinInt64 {
		t.Errorf("i64 became %d", v)
	}
	if v := math.Float64frombits(binary.LittleEndian.Uint64(raw[9])); v != 0.1 {
		t.Errorf("f64 became %v", v)
	}
	typed := &oip.ModelInferRequest{ModelName: "types"}
	contents := map[string]*oip.InferTensorContents{ // f16 and bf16 have none
		"bool": {BoolContents: []bool{true, false}}, "u8": {UintContents: []uint32{0, 255}}, "i8": {IntContents: []int32{-128, 127}},
		"i16": {IntContents: []int32{-32768, 32767}}, "i32": {IntContents: []int32{math.MinInt32, math.MaxInt32}},
		"i64": {Int64Contents: []int64{math.MinInt64, math.MaxInt64}}, "f32": {Fp32Contents: []float32{0.1, -1e-30}},
		"f64": {Fp64Contents: []float64{0.1, 1e300}},
	}
	for _, d := range typeOrder {
		in := rpcInput(d+"_in", wireName(t, d), 1, 2)
		in.Contents = contents[d]
		typed.Inputs = append(typed.Inputs, in)
	}
	if _, err := r.client().ModelInfer(soon(t), typed); err == nil || !strings.Contains(err.Error(), "raw_input_contents") {
		t.Errorf("contents without those of f16: %v", err)
	}
	r.idle()
}

func TestAModelOfATypeThatTheProtocolLacksIsRefused(t *testing.T) {
	m := modelConfig(t, "eighth", []string{"x:u8[2]"}, []string{"y:f8e4m3fn[2]"})
	r := newRig(t, nil, m)
	r.worker(m, echo)
	a := r.infer("eighth", `{"inputs":[{"name":"x","shape":[1,2],"datatype":"UINT8","data":[1,2]}]}`)
	if a.status != http.StatusNotImplemented || !strings.Contains(a.Error, "y:f8e4m3fn[2], and the Open Inference Protocol has no such type") {
		t.Errorf("%+v", a)
	}
	for _, path := range []string{"", "/config", "/ready"} {
		if code := r.get("/v2/models/eighth" + path); code != http.StatusNotImplemented {
			t.Errorf("%s: %d", path, code)
		}
	}
	if _, err := r.client().ModelConfig(soon(t), &oip.ModelConfigRequest{Name: "eighth"}); rpcstatus.Code(err) != codes.Unimplemented {
		t.Error(err)
	}
}

func TestOnlyRequestedOutputsAreAnsweredInTheOrderAskedFor(t *testing.T) {
	m := modelConfig(t, "m", []string{"a:i32[1]", "b:i32[1]", "c:i32[1]"}, []string{"A:i32[1]", "B:i32[1]", "C:i32[1]"})
	r := newRig(t, nil, m)
	r.worker(m, echo)
	in := func(name string, v int) string {
		return fmt.Sprintf(`{"name":%q,"shape":[1,1],"datatype":"INT32","data":[%d]}`, name, v)
	}
	// Inputs in another order than the signature's, one output as JSON, one binary.
	a := r.infer("m", `{"inputs":[`+in("c", 3)+`,`+in("a", 1)+`,`+in("b",
		2)+`],"outputs":[{"name":"C"},{"name":"A","parameters":{"binary_data":true}}]}`)
	if a.status != 200 || len(a.Outputs) != 2 || a.Outputs[0].Name != "C" || fmt.Sprint(a.Outputs[0].Data) != "[3]" ||
		a.Outputs[1].Name != "A" || !bytes.Equal(a.raw, []byte{1, 0, 0, 0}) {
		t.Errorf("%+v", a)
	}
	rep, err := r.client().ModelInfer(soon(t), &oip.ModelInferRequest{ModelName: "m",
		Inputs: []*oip.ModelInferRequest_InferInputTensor{rpcInput("b", "INT32", 1, 1), rpcInput("c", "INT32", 1, 1),
			rpcInput("a", "INT32", 1, 1)},
		RawInputContents: [][]byte{{2, 0, 0, 0}, {3, 0, 0, 0}, {1, 0, 0, 0}},
		Outputs:          []*oip.ModelInferRequest_InferRequestedOutputTensor{{Name: "B"}}})
	must.Do(t, err)
	if len(rep.Outputs) != 1 || rep.Outputs[0].Name != "B" || !bytes.Equal(rep.RawOutputContents[0], []byte{2, 0, 0, 0}) {
		t.Errorf("%v", rep)
	}
	r.idle()
}

func TestMoreRowsThanABatchAreSplitAndJoined(t *testing.T) {
	m := modelConfig(t, "m", []string{"a:i32[2]", "b:i32[1]"}, []string{"A:i32[2]", "B:i32[1]"})
	for _, window := range []int{0, 8} { // of the second size not even two parts are under way at once
		r := newRig(t, func(c *core.Config) { c.Window = window }, m)
		r.worker(m, echo)
		const rows = 101 // 12 batches of 8, and 5 rows
		var a, b []byte
		var jsonA, jsonB []string
		for i := range rows {
			for _, v := range []int{i, -i} {
				a = binary.LittleEndian.AppendUint32(a, uint32(int32(v)))
				jsonA = append(jsonA, fmt.Sprint(v))
			}
			b = binary.LittleEndian.AppendUint32(b, uint32(1000+i))
			jsonB = append(jsonB, fmt.Sprint(1000+i))
		}
		head := fmt.Sprintf(`{"inputs":[{"name":"b","shape":[%d,1],"datatype":"INT32",`+
			`"parameters":{"binary_data_size":%d}},{"name":"a","shape":[%d,2],"datatype":"INT32",`+
			`"parameters":{"binary_data_size":%d}}],"parameters":{"binary_data_output":true}}`, rows, len(b), rows, len(a))
		got := r.inferBinary("m", head, b, a)
		if got.status != 200 || !bytes.Equal(got.raw, append(slices.Clone(a), b...)) ||
			fmt.Sprint(got.Outputs[0].Shape) != fmt.Sprint([]int{rows, 2}) {
			t.Errorf("binary: %d %s, %d bytes", got.status, got.Error, len(got.raw))
		}
		got = r.infer("m", fmt.Sprintf(`{"inputs":[{"name":"a","shape":[%d,2],"datatype":"INT32","data":[%s]},{"name":"b",`+
			`"shape":[%d,1],"datatype":"INT32","data":[%s]}],"parameters":{"binary_data_output":true}}`,
			rows, strings.Join(jsonA, ","), rows, strings.Join(jsonB, ",")))
		if got.status != 200 || !bytes.Equal(got.raw, append(slices.Clone(a), b...)) {
			t.Errorf("JSON: %d %s", got.status, got.Error)
		}
		rep, err := r.client().ModelInfer(soon(t), &oip.ModelInferRequest{ModelName: "m",
			Inputs:           []*oip.ModelInferRequest_InferInputTensor{rpcInput("a", "INT32", rows, 2), rpcInput("b", "INT32", rows, 1)},
			RawInputContents: [][]byte{a, b}})
		must.Do(t, err)
		if !bytes.Equal(rep.RawOutputContents[0], a) || !bytes.Equal(rep.RawOutputContents[1], b) || rep.Outputs[1].Shape[0] != rows {
			t.Errorf("gRPC: %v", rep.Outputs)
		}
		r.idle()
	}
}

func TestVariableDimensionsWorkWithAndWithoutBuckets(t *testing.T) {
	plain := modelConfig(t, "plain", []string{"x:i16[2,<=5]"}, []string{"y:i16[2,<=5]"})
	bucketed := modelConfig(t, "bucketed", []string{"x:i16[2,<=5]"}, []string{"y:i16[2,<=5]"})
	bucketed.Policy["buckets.x.1"] = "2,5"
	r := newRig(t, nil, plain, bucketed)
	r.worker(plain, sameSize)
	r.worker(bucketed, sameSize)
	for _, name := range []string{"plain", "bucketed"} {
		for _, n := range []int{1, 3, 5} {
			rows := 3
			var x []byte
			for i := range rows * n * 2 {
				x = binary.LittleEndian.AppendUint16(x, uint16(i+1))
			}
			head := fmt.Sprintf(`{"inputs":[{"name":"x","shape":[%d,2,%d],"datatype":"INT16","parameters":{"binary_data_size":%d}}],`+
				`"parameters":{"binary_data_output":true}}`, rows, n, len(x))
			a := r.inferBinary(name, head, x)
			if a.status != 200 {
				t.Fatalf("%s %d: %s", name, n, a.Error)
			}
			size := n
			if name == "bucketed" {
				size = map[int]int{1: 2, 3: 5, 5: 5}[n]
			}
			if fmt.Sprint(a.Outputs[0].Shape) != fmt.Sprint([]int{rows, 2, size}) {
				t.Errorf("%s %d: shape %v", name, n, a.Outputs[0].Shape)
			}
			for i := range rows * 2 { // the corner is the input, the rest is zero
				line := a.raw[i*size*2 : (i+1)*size*2]
				if !bytes.Equal(line[:n*2], x[i*n*2:(i+1)*n*2]) || !bytes.Equal(line[n*2:], make([]byte, (size-n)*2)) {
					t.Errorf("%s %d: line %d is %x", name, n, i, line)
				}
			}
			rep, err := r.client().ModelInfer(soon(t), &oip.ModelInferRequest{ModelName: name,
				Inputs:           []*oip.ModelInferRequest_InferInputTensor{rpcInput("x", "INT16", int64(rows), 2, int64(n))},
				RawInputContents: [][]byte{x}})
			must.Do(t, err)
			if !bytes.Equal(rep.RawOutputContents[0], a.raw) {
				t.Errorf("gRPC and HTTP differ")
			}
		}
	}
	if a := r.infer("plain",
		`{"inputs":[{"name":"x","shape":[1,2,6],"datatype":"INT16","data":[1,2,3,4,5,6,7,8,9,10,11,12]}]}`); a.status != 400 ||
		!strings.Contains(a.Error, "at most 5") {
		t.Errorf("a size beyond the largest: %d %s", a.status, a.Error)
	}
	r.idle()
}

// A request of several texts is several rows, and each of them costs.
func TestABatchOfTheGatewaysRequestsIsFullWhenItsRowsCostEnough(t *testing.T) {
	m := modelConfig(t, "texts", []string{"x:u8[<=8]"}, []string{"y:u8[]"})
	m.Policy = policy.New(policy.MaxBatchCost(12), policy.WaitTime(patience)).Over(m.Policy)
	r := newRig(t, nil, m)
	batches := make(chan int, 2)
	r.worker(m, func(_ context.Context, b *worker.Batch) error {
		for i := range b.Rows() {
			b.Output(0).Bytes(i)[0] = b.Input(0).Bytes(i)[3]
		}
		batches <- b.Rows()
		return nil
	})
	idle, err := client.Dial(soon(t), "texts", client.WithSocket(r.socket))
	must.Do(t, err)
	defer idle.Close() // could always join, so that only full batches go out
	var wg sync.WaitGroup
	ask := func(shape, data, want string) {
		wg.Go(func() {
			a := r.infer("texts", `{"inputs":[{"name":"x","datatype":"UINT8","shape":`+shape+`,"data":`+data+`}]}`)
			if a.status != 200 || fmt.Sprint(a.Outputs[0].Data) != want {
				t.Errorf("%+v, not %s", a, want)
			}
		})
	}
	ask("[2,4]", "[0,0,0,1,0,0,0,2]", "[1 2]")
	ask("[1,4]", "[0,0,0,3]", "[3]")
	wg.Wait()
	ask("[4,4]", "[0,0,0,4,0,0,0,5,0,0,0,6,0,0,0,7]", "[4 5 6 7]") // above the maximum: alone
	wg.Wait()
	if one, two := <-batches, <-batches; one != 3 || two != 4 {
		t.Errorf("batches of %d and %d rows", one, two)
	}
}
