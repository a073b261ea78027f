// SPDX-License-Identifier: Apache-2.0

package core_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/worker"
)

// writerRig has a model that writes n letters, each when a value comes from steps, and how
// many requests ended.
func writerRig(t *testing.T) (r *rig, steps chan bool) {
	m := modelConfig(t, "writer", []string{"n:i32[]"}, []string{"text:u8[<=64]", "sum:i32[]"})
	r, steps = newRig(t, nil, m), make(chan bool)
	r.worker(m, func(_ context.Context, b *worker.Batch) error {
		n := worker.Row[int32](b.Input(0), 0)[0]
		text := b.Output(0).Bytes(0)
		worker.Row[int32](b.Output(1), 0)[0] = n
		must.Do(t, b.Show(0, 0))
		for i := range int(n) {
			for ok := false; !ok; ok = b.Waiting(0) && <-steps {
				if !b.Waiting(0) {
					return nil
				}
			}
			text[i] = 'a' + byte(i)
			must.Do(t, b.Show(0, i+1))
		}
		return nil
	})
	r.until("the worker attached", func() bool { return len(r.stats("writer").Workers) == 1 })
	return r, steps
}

func (r *rig) generate(ctx context.Context, path, body string) *http.Response {
	r.t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.http+path, strings.NewReader(body))
	must.Do(r.t, err)
	a, err := http.DefaultClient.Do(req)
	must.Do(r.t, err)
	r.t.Cleanup(func() { a.Body.Close() })
	return a
}

// fields are the outputs in an answer of the generate extension.
func fields(t *testing.T, text []byte) string {
	t.Helper()
	var f struct {
		Model string `json:"model_name"`
		Text  []int
		Sum   *int
		Error string
	}
	must.Do(t, json.Unmarshal(text, &f))
	if f.Model != "writer" && f.Error == "" {
		t.Errorf("an answer of model %q: %s", f.Model, text)
	}
	said := f.Error
	if f.Text != nil {
		said = fmt.Sprint(f.Text)
	}
	if f.Sum != nil {
		said += fmt.Sprint(" sum ", *f.Sum)
	}
	return said
}

func TestAFieldOfGenerateThatIsNoInputIsAParameter(t *testing.T) {
	r, _ := writerRig(t)
	for body, want := range map[string]string{
		`{"n": 0, "timeout": -1}`:                                       "timeout -1",
		`{"n": 0, "priority": "high"}`:                                  `parameter "priority"`,
		`{"n": 0, "timeout": 60000000, "parameters": {"timeout": 9}}`:   `"timeout" is given twice, as 60000000 and 9`,
		`{"n": 0, "timeout": 6e7, "parameters": {"timeout": 60000000}}`: `parameter "timeout"`,
		`{"N": 0}`:   `input "n" of model "writer" is missing`,
		`{"n": 1.5}`: `input "n": element 0: wrong element type: "1.5" is no i32: want a whole number`,
	} {
		for _, how := range []string{"generate", "generate_stream"} {
			r.post("/v2/models/writer/"+how, nil, []byte(body)).is(t, how+body, http.StatusBadRequest, want)
		}
	}
	same := `{"n": 0, "timeout": 60000000, "stream": true, "parameters": {"stream": false, "timeout": 60000000}}`
	r.post("/v2/models/writer/generate", nil, []byte(same)).is(t, same, http.StatusOK)
}

func TestGenerateAnswersWholeAndInEvents(t *testing.T) {
	r, steps := writerRig(t)
	go func() { steps <- true; steps <- true }()
	a := r.generate(soon(t), "/v2/models/writer/generate", `{"n": 2, "nobody": {"knows": []}}`)
	whole, err := io.ReadAll(a.Body)
	must.Do(t, err)
	if got := fields(t, whole); got != "[97 98] sum 2" {
		t.Errorf("generate: %s (%s)", got, whole)
	}
	a = r.generate(soon(t), "/v2/models/writer/generate_stream", `{"n": [3]}`)
	if a.StatusCode != http.StatusBadRequest {
		t.Errorf("a list for a number: %d", a.StatusCode)
	}
	ctx, cancel := context.WithCancel(soon(t))
	started := make(chan *http.Response, 1)
	go func() { started <- r.generate(ctx, "/v2/models/writer/generate_stream", `{"n": 3}`) }()
	steps <- true // the head of the answer comes with the first event
	events := bufio.NewReader((<-started).Body)
	next := func() string {
		line, err := events.ReadString('\n')
		if err != nil {
			return err.Error()
		}
		_, _ = events.ReadString('\n')
		return fields(t, []byte(strings.TrimPrefix(line, "data: ")))
	}
	for i, want := range []string{"[97]", "[98]", "[99]", " sum 3"} {
		if i > 0 && i < 3 {
			steps <- true
		}
		if got := next(); got != want {
			t.Errorf("event %d is %q, not %q", i, got, want)
		}
	}
	if got := next(); got != "EOF" {
		t.Errorf("after the last event: %q", got)
	}
	// An answer without steps is one event; a caller who hangs up cancels his request.
	a = r.generate(soon(t), "/v2/models/writer/generate_stream", `{"n": 0}`)
	whole, _ = io.ReadAll(a.Body)
	if got := fields(t, whole[len("data: "):]); got != "[] sum 0" || a.Header.Get("Content-Type") != "text/event-stream; charset=utf-8" {
		t.Errorf("an empty answer: %s", whole)
	}
	go func() { started <- r.generate(ctx, "/v2/models/writer/generate_stream", `{"n": 64}`) }()
	steps <- true
	<-started
	cancel()
	r.until("the request was canceled", func() bool { return r.stats("writer").Ended["Canceled"] == 1 })
	close(steps)
	r.idle()
}

func TestAStreamOfTheProtocolAnswersInPartsIfAsked(t *testing.T) {
	r, steps := writerRig(t)
	s, err := r.client().ModelStreamInfer(soon(t))
	must.Do(t, err)
	ask := func(model string, parts bool, n byte) {
		m := &oip.ModelInferRequest{ModelName: model, Id: fmt.Sprint(n), Inputs: []*oip.ModelInferRequest_InferInputTensor{
			{Name: "n", Datatype: "INT32", Shape: []int64{1}}}, RawInputContents: [][]byte{{n, 0, 0, 0}}}
		if parts {
			m.Parameters = map[string]*oip.InferParameter{"triton_enable_empty_final_response": {ParameterChoice: &oip.InferParameter_BoolParam{BoolParam: true}}}
		}
		must.Do(t, s.Send(m))
	}
	next := func() string {
		a, err := s.Recv()
		must.Do(t, err)
		said := a.ErrorMessage + a.InferResponse.GetId()
		for i, o := range a.InferResponse.GetOutputs() {
			said += fmt.Sprint(" ", o.Name, o.Shape, a.InferResponse.RawOutputContents[i])
		}
		if last := a.InferResponse.GetParameters()["triton_final_response"]; last != nil {
			said += fmt.Sprint(" ", last.GetBoolParam())
		}
		return said
	}
	ask("writer", true, 2)
	for i, want := range []string{"2 text[1 1] [97] false", "2 text[1 1] [98] false", "2 sum[1] [2 0 0 0] false", "2 true"} {
		if i < 2 { // others are answered meanwhile
			ask("nobody", i == 0, 9)
			if unknown := next(); !strings.HasSuffix(unknown, "9") {
				t.Errorf("beside a long answer: %q", unknown)
			}
			steps <- true
		}
		if got := next(); got != want {
			t.Errorf("answer %d is %q, not %q", i, got, want)
		}
	}
	ask("writer", false, 1)
	steps <- true
	if got := next(); got != "1 text[1 1] [97] sum[1] [1 0 0 0]" {
		t.Errorf("without the parameter: %q", got)
	}
	close(steps)
	r.idle()
}
