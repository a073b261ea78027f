// SPDX-License-Identifier: Apache-2.0

package core_test

import (
	"bytes"
	"compress/gzip"
	"compress/zlib"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"unicode/utf8"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	rpcstatus "google.golang.org/grpc/status"

	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/worker"
)

const goodInput = `{"name":"x","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}`

const goodBody = `{"inputs":[` + goodInput + `]}`

func TestABadRequestIsAnsweredWithItsReason(t *testing.T) {
	t.Parallel()
	r := doublingRig(t, func(c *core.Config) { c.MaxMessageBytes = 1 << 20 })
	input := func(text string) string { return `{"inputs":[` + text + `]}` }
	for _, c := range []struct {
		name, body, reason string
		status             int
	}{
		{"nothing", ``, "JSON", 400},
		{"no JSON", `hello`, "JSON", 400},
		{"half a JSON", `{"inputs":[`, "JSON", 400},
		{"something after it", input(goodInput) + `x`, "follows", 400},
		{"deep nesting", `{"a":` + strings.Repeat("[", 10_000) + strings.Repeat("]", 10_000) + `}`, "deep", 400},
		{"deep data", input(`{"name":"x","shape":[1,4],"datatype":"FP32","data":` + strings.Repeat("[", 1000) + `1` +
			strings.Repeat("]", 1000) + `}`), "deep", 400},
		{"no input", `{"inputs":[]}`, `input "x" of model`, 400},
		{"an unknown input", input(`{"name":"z","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}`), `no input "z"`, 400},
		{"an input twice", input(goodInput + `,` + goodInput), "twice", 400},
		{"another type", input(`{"name":"x","shape":[1,4],"datatype":"INT32","data":[1,2,3,4]}`), "FP32", 400},
		{"an unknown type", input(`{"name":"x","shape":[1,4],"datatype":"FP31","data":[1,2,3,4]}`), "FP31", 400},
		{"a type that no ring has", input(`{"name":"x","shape":[1,4],"datatype":"UINT64","data":[1,2,3,4]}`), "UINT64", 400},
		{"another shape", input(`{"name":"x","shape":[1,5],"datatype":"FP32","data":[1,2,3,4,5]}`), "shape", 400},
		{"no rows dimension", input(`{"name":"x","shape":[4],"datatype":"FP32","data":[1,2,3,4]}`), "[-1 4]", 400},
		{"no rows", input(`{"name":"x","shape":[0,4],"datatype":"FP32","data":[]}`), "rows", 400},
		{"negative rows", input(`{"name":"x","shape":[-1,4],"datatype":"FP32","data":[]}`), "shape", 400},
		{"endless rows", input(`{"name":"x","shape":[999999999999,4],"datatype":"FP32","data":[]}`), "rows", 400},
		{"too few elements", input(`{"name":"x","shape":[1,4],"datatype":"FP32","data":[1,2,3]}`), "has more", 400},
		{"too many elements", input(`{"name":"x","shape":[1,4],"datatype":"FP32","data":[1,2,3,4,5]}`), "more", 400},
		{"words", input(`{"name":"x","shape":[1,4],"datatype":"FP32","data":[1,2,3,true]}`), "true", 400},
		{"texts", input(`{"name":"x","shape":[1,4],"datatype":"FP32","data":[1,2,3,"4"]}`), "string", 400},
		{"numbers that JSON has not", input(`{"name":"x","shape":[1,4],"datatype":"FP32","data":[1,2,3,0x4]}`), "0x4", 400},
		{"no bytes at all", input(`{"name":"x","shape":[1,4],"datatype":"FP32"}`), "one way", 400},
		{"bytes in two ways", input(`{"name":"x","shape":[1,4],"datatype":"FP32","data":[1,2,3,4],"parameters":{"binary_data_size":16}}`),
			"one way", 400},
		{"binary without a length", input(`{"name":"x","shape":[1,4],"datatype":"FP32","parameters":{"binary_data_size":16}}`),
			headerLength, 400},
		{"an unknown output", `{"inputs":[` + goodInput + `],"outputs":[{"name":"z"}]}`, `no output "z"`, 400},
		{"an output twice", `{"inputs":[` + goodInput + `],"outputs":[{"name":"y"},{"name":"y"}]}`, "twice", 400},
		{"classification", `{"inputs":[` + goodInput + `],"outputs":[{"name":"y","parameters":{"classification":3}}]}`, "classification",
			400},
		{"a priority in quotes", `{"parameters":{"priority":"1"},"inputs":[` + goodInput + `]}`, "expected a whole number", 400},
		{"no datatype", input(strings.Replace(goodInput, `"datatype":"FP32",`, "", 1)), "no datatype", 400},
		{"an unknown priority", `{"parameters":{"priority":7},"inputs":[` + goodInput + `]}`, "priority", 400},
		{"shared memory that is off",
			input(`{"name":"x","shape":[1,4],"datatype":"FP32","parameters":{"shared_memory_region":"r","shared_memory_byte_size":16}}`),
			"--system-shared-memory", 403},
		{"too large", `{"inputs":[` + goodInput + `],"x":"` + strings.Repeat("x", 1<<20) + `"}`, "at most", 413},
	} {
		a := r.infer("double", c.body)
		if a.status != c.status || !strings.Contains(a.Error, c.reason) {
			t.Errorf("%s: %d %q", c.name, a.status, a.Error)
		}
	}
	for _, c := range []struct {
		name, length, body, reason string
		status                     int
	}{
		{"a length that is none", "x", "{}", "no length", 400},
		{"a negative length", "-1", "{}", "no length", 400},
		{"a length beyond the body", "3", "{}", "3", 400},
		{"an endless length", "99999999999999999", "{}", "99999999999999999", 400},
		{"rows that are not whole", "0", "12345", "whole rows", 400},
		{"more bytes than announced", "2", "{}xx", "announced", 400},
		{"fewer bytes than announced", "100",
			`{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","parameters":{"binary_data_size":16}}]}         `[:100], "announced",
			400},
		{"tensors of another size than their shape", "100",
			`{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","parameters":{"binary_data_size":12}}]}         `[:100] +
				"123456789012", "16 bytes", 400},
		{"a negative size", "100",
			`{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","parameters":{"binary_data_size":-2}}]}         `[:100], "one way",
			400},
	} {
		a := r.post("/v2/models/double/infer", map[string]string{headerLength: c.length}, []byte(c.body))
		if a.status != c.status || !strings.Contains(a.Error, c.reason) {
			t.Errorf("%s: %d %q", c.name, a.status, a.Error)
		}
	}
	r.infer("nothing", "{}").is(t, "an unknown model", 404, `"nothing"`)
	r.post("/v2/models/double/versions/7/infer", nil, nil).is(t, "an unknown version", 404, "version")
	r.post("/v2/models/double/versions/1/infer", nil, []byte(input(goodInput))).is(t, "the version that there is", 200)
	if a := r.infer("double", `{"parameters":{"whatever":[1,{"a":null}]},"unknown":7,"inputs":[`+strings.Replace(goodInput, `"data"`,
		`"parameters":{"nobody":"knows"},"data"`, 1)+`]}`); a.status != 200 {
		t.Errorf("unknown parameters: %d %q", a.status, a.Error)
	}
	if a := r.infer("double",
		`{"id":null,"parameters":{"priority":null,"timeout": null },"outputs":null,"inputs":[`+strings.Replace(goodInput, `"data"`,
			`"parameters":null,"data"`, 1)+`]}`); a.status != 200 {
		t.Errorf("null for what is left out: %d %q", a.status, a.Error)
	}
	r.idle()
}

func TestABadMessageIsAnsweredWithItsReason(t *testing.T) {
	t.Parallel()
	r := doublingRig(t, nil)
	c := r.client()
	good := floats(1, 2, 3, 4)
	x := func(shape ...int64) []*oip.ModelInferRequest_InferInputTensor {
		return []*oip.ModelInferRequest_InferInputTensor{rpcInput("x", "FP32", shape...)}
	}
	for _, k := range []struct {
		name, reason string
		code         codes.Code
		req          *oip.ModelInferRequest
	}{
		{"an unknown model", `"nothing"`, codes.NotFound, &oip.ModelInferRequest{ModelName: "nothing"}},
		{"an unknown version", "version", codes.NotFound, &oip.ModelInferRequest{ModelName: "double", ModelVersion: "7"}},
		{"no input", `input "x" of model`, codes.InvalidArgument, &oip.ModelInferRequest{ModelName: "double"}},
		{"no bytes", "too few", codes.InvalidArgument, &oip.ModelInferRequest{ModelName: "double", Inputs: x(1, 4)}},
		{"bytes too many", "more than", codes.InvalidArgument,
			&oip.ModelInferRequest{ModelName: "double", Inputs: x(1, 4), RawInputContents: [][]byte{good, good}}},
		{"another size", "16 bytes", codes.InvalidArgument, &oip.ModelInferRequest{ModelName: "double", Inputs: x(1, 4),
			RawInputContents: [][]byte{good[:15]}}},
		{"another shape", "shape", codes.InvalidArgument, &oip.ModelInferRequest{ModelName: "double", Inputs: x(1, 5),
			RawInputContents: [][]byte{good}}},
		{"a negative shape", "shape", codes.InvalidArgument, &oip.ModelInferRequest{ModelName: "double", Inputs: x(-1, 4),
			RawInputContents: [][]byte{good}}},
		{"a priority that is no whole number", "whole number", codes.InvalidArgument,
			&oip.ModelInferRequest{ModelName: "double", Inputs: x(1, 4), RawInputContents: [][]byte{good},
				Parameters: map[string]*oip.InferParameter{
					"priority": {ParameterChoice: &oip.InferParameter_DoubleParam{DoubleParam: 1}}}}},
		{"shared memory that is off", "--system-shared-memory", codes.PermissionDenied,
			&oip.ModelInferRequest{ModelName: "double", Inputs: []*oip.ModelInferRequest_InferInputTensor{{Name: "x", Datatype: "FP32",
				Shape: []int64{1, 4},
				Parameters: map[string]*oip.InferParameter{
					"shared_memory_region":    {ParameterChoice: &oip.InferParameter_StringParam{StringParam: "r"}},
					"shared_memory_byte_size": {ParameterChoice: &oip.InferParameter_Int64Param{Int64Param: 16}}}}}}},
	} {
		_, err := c.ModelInfer(soon(t), k.req)
		if s, _ := rpcstatus.FromError(err); s.Code() != k.code || !strings.Contains(s.Message(), k.reason) {
			t.Errorf("%s: %v", k.name, err)
		}
	}
	r.idle()
}

func TestPathsOfThisHostAreNotTold(t *testing.T) {
	for err, want := range map[error]error{
		status.ErrNoBroker:       status.ErrNoBroker,
		status.ErrTimeout:        status.ErrTimeout,
		context.DeadlineExceeded: status.ErrExpired,
		context.Canceled:         status.ErrCanceled,
	} {
		if text := core.TextOf(fmt.Errorf("dial m: %w (socket /run/user/7/broker.sock)", err)); text != want.Error() {
			t.Errorf("%v: %s", err, text)
		}
	}
}

func TestACompressedBodyIsReadAndABombIsNot(t *testing.T) {
	r := doublingRig(t, func(c *core.Config) { c.MaxMessageBytes = 64 << 10 })
	pack := map[string]func(io.Writer) io.WriteCloser{
		"gzip":    func(w io.Writer) io.WriteCloser { return gzip.NewWriter(w) },
		"deflate": func(w io.Writer) io.WriteCloser { return zlib.NewWriter(w) },
	}
	for name, writer := range pack {
		squeeze := func(b []byte) []byte {
			var out bytes.Buffer
			w := writer(&out)
			_, _ = w.Write(b)
			w.Close()
			return out.Bytes()
		}
		header := map[string]string{"Content-Encoding": name}
		r.post("/v2/models/double/infer", header, squeeze([]byte(goodBody))).is(t, name, 200)
		head := `{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","parameters":{"binary_data_size":16}}]}`
		header[headerLength] = fmt.Sprint(len(head))
		if a := r.post("/v2/models/double/infer", header, squeeze(append([]byte(head), floats(1, 2, 3, 4)...))); a.status != 200 {
			t.Errorf("%s, binary: %d %q", name, a.status, a.Error)
		}
		if a := r.post("/v2/models/double/infer", header, squeeze(append([]byte(head), floats(1, 2, 3, 4, 5)...))); a.status != 400 {
			t.Errorf("%s, too much: %d %q", name, a.status, a.Error)
		}
		delete(header, headerLength)
		if a := r.post("/v2/models/double/infer", header, squeeze(make([]byte, 1<<20))); a.status != 413 {
			t.Errorf("%s, a bomb: %d %q", name, a.status, a.Error)
		}
		if a := r.post("/v2/models/double/infer", header, []byte("no such thing")); a.status != 400 {
			t.Errorf("%s, rubbish: %d %q", name, a.status, a.Error)
		}
	}
	r.idle()
}

func TestAModelsOwnErrorIsToldOnBothProtocolsAsTextWithoutItsTraceback(t *testing.T) {
	m := doubler(t)
	r := newRig(t, nil, m)
	var fails atomic.Pointer[string]
	r.worker(m, func(context.Context, *worker.Batch) error { return errors.New(*fails.Load()) })
	s, err := r.client().ModelStreamInfer(soon(t))
	must.Do(t, err)
	for text, want := range map[string]string{
		"the cat is on the keyboard": "the cat is on the keyboard",
		"ValueError: no such row\nTraceback (most recent call last):\n  File \"/x\"": "ValueError: no such row",
		"caf\xe9 " + strings.Repeat("é", core.MaxTextBytes):                          "caf",
	} {
		fails.Store(&text)
		a := r.infer("double", goodBody)
		_, err := r.client().ModelInfer(soon(t), doubleMessage())
		if got, _ := rpcstatus.FromError(err); a.status != 500 || got.Code() != codes.Internal || a.Error != got.Message() ||
			!strings.HasPrefix(a.Error, want) {
			t.Errorf("%d %q, %v", a.status, a.Error, err)
		}
		must.Do(t, s.Send(doubleMessage())) // the stream goes on
		rep, err := s.Recv()
		must.Do(t, err)
		if rep.ErrorMessage != a.Error || strings.Contains(a.Error, "Traceback") || !utf8.ValidString(a.Error) {
			t.Errorf("a stream says %q, HTTP %q", rep.ErrorMessage, a.Error)
		}
	}
	r.idle()
}

// A relay sends such a call to another host.
func TestAFailedCallSaysWhetherNothingOfItHasRun(t *testing.T) {
	m := doubler(t)
	r := newRig(t, nil, m)
	r.worker(m, func(context.Context, *worker.Batch) error { return errors.New("no such row") })
	c := r.client()
	unknown := doubleMessage()
	unknown.ModelName = "nothing"
	for name, k := range map[string]struct {
		req   *oip.ModelInferRequest
		state int32
		want  string
	}{
		"an unknown model":        {unknown, core.NotDraining, "Refused"},
		"while the gateway ends":  {doubleMessage(), core.Refusing, "Draining"},
		"a model that has failed": {doubleMessage(), core.NotDraining, ""},
	} {
		r.g.Draining.Store(k.state)
		var trailer metadata.MD
		_, err := c.ModelInfer(soon(t), k.req, grpc.Trailer(&trailer))
		if got := strings.Join(trailer.Get(oip.NotRunTrailer), ""); err == nil || got != k.want {
			t.Errorf("%s: %q, want %q; %v", name, got, k.want, err)
		}
	}
	r.g.Draining.Store(core.NotDraining)
}

func TestACompressedMessageIsAnsweredAsAnyOther(t *testing.T) {
	r := doublingRig(t, func(c *core.Config) { c.MaxMessageBytes, c.MaxBufferedBytes = 1<<20, 1<<20 }) // a caller has 256 KiB
	c := r.client()
	large := doubleMessage()
	large.Id = strings.Repeat("x", 200<<10)
	for _, name := range []string{"gzip", "deflate"} {
		use := grpc.UseCompressor(name)
		rep, err := c.ModelInfer(soon(t), doubleMessage(), use)
		must.Do(t, err)
		plain, err := c.ModelInfer(soon(t), doubleMessage())
		must.Do(t, err)
		if !bytes.Equal(rep.RawOutputContents[0], plain.RawOutputContents[0]) {
			t.Errorf("%s: %v, not %v", name, rep.RawOutputContents, plain.RawOutputContents)
		}
		if _, err := c.ModelMetadata(soon(t), &oip.ModelMetadataRequest{Name: "double"}, use); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		s, err := c.ModelStreamInfer(soon(t), use)
		must.Do(t, err)
		for i, want := range []string{"an id of", "buffers are full", "an id of"} {
			others := int64(i % 2 * 900 << 10) // bytes of other callers
			r.g.Used().Add(others)
			must.Do(t, s.Send(large))
			rep, err := s.Recv()
			must.Do(t, err)
			if !strings.Contains(rep.ErrorMessage, want) {
				t.Errorf("%s, message %d of a stream: %q, want %q", name, i, rep.ErrorMessage, want)
			}
			r.g.Used().Add(-others)
		}
	}
	r.idle()
}
