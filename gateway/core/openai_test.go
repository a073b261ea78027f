// SPDX-License-Identifier: Apache-2.0

package core_test

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/worker"
)

// embedder's vectors are 3, 4 and the text's size; it has as many tokens as bytes.
func embedder(_ context.Context, b *worker.Batch) error {
	for i := range b.Rows() {
		text := b.Input(0).Texts(i)[0]
		if text == "odd" {
			b.Fail(i, errors.New("BadText: the text is odd"))
			continue
		}
		copy(worker.Row[float32](b.Output(0), i), []float32{3, 4, float32(len(text))})
		worker.Row[int32](b.Output(1), i)[0] = int32(len(text))
	}
	return nil
}

// embeddings posts a request of OpenAI's, and returns the status and the answer.
func (r *rig) embeddings(body string) (int, string) {
	r.t.Helper()
	rep, err := http.Post(r.http+"/v1/embeddings", "application/json", strings.NewReader(body))
	must.Do(r.t, err)
	defer rep.Body.Close()
	text, err := io.ReadAll(rep.Body)
	must.Do(r.t, err)
	return rep.StatusCode, string(text)
}

func TestEmbeddingsAreAnsweredAsOpenAIDoes(t *testing.T) {
	m := modelConfig(t, "embedder", []string{"text:str[<=16]"}, []string{"embedding:f32[3]", "tokens:i32[]"})
	r := newRig(t, nil, m, doubler(t))
	r.worker(m, embedder)

	status, text := r.embeddings(`{"model":"embedder","input":["a","grüße", ""],"user":"me"}`)
	want := `{"object":"list","data":[{"object":"embedding","index":0,"embedding":[3,4,1]},` +
		`{"object":"embedding","index":1,"embedding":[3,4,7]},{"object":"embedding","index":2,"embedding":[3,4,0]}],` +
		`"model":"embedder","usage":{"prompt_tokens":8,"total_tokens":8}}`
	if status != 200 || text != want {
		t.Errorf("%d %s, want %s", status, text, want)
	}
	var rep struct{ Data []struct{ Embedding string } }
	_, text = r.embeddings(`{"model":"embedder","input":"ab","encoding_format":"base64"}`)
	must.Do(t, json.Unmarshal([]byte(text), &rep))
	if b, err := base64.StdEncoding.DecodeString(rep.Data[0].Embedding); err != nil || !slices.Equal(b, floats(3, 4, 2)) {
		t.Errorf("base64: %v, %v", b, err)
	}
	if _, text = r.embeddings(`{"model":"embedder","input":"ab","dimensions":2}`); !strings.Contains(text, `"embedding":[0.6,0.8]`) {
		t.Errorf("two dimensions have not the length 1: %s", text)
	}
	many := `{"model":"embedder","input":["` + strings.Repeat(`x","`, 299) + `xy"]}` // several batches
	if status, text = r.embeddings(many); status != 200 || strings.Count(text, "[3,4,1]") != 299 || !strings.Contains(text, `:301,`) {
		t.Errorf("300 texts: %d %.300s", status, text)
	}
	r.idle()
}

func TestEmbeddingsAreRefusedInOpenAIsForm(t *testing.T) {
	m := modelConfig(t, "embedder", []string{"text:str[<=16]"}, []string{"embedding:f32[3]", "tokens:i32[]"})
	r := newRig(t, func(c *core.Config) { c.MaxMessageBytes = 1 << 20 }, m, doubler(t))
	r.worker(m, embedder)
	for _, c := range []struct {
		body   string
		status int
		says   string
	}{
		{`{"model":"embedder","input":[[1,2]]}`, 400, "tokens are not taken"},
		{`{"model":"embedder","input":[1,2]}`, 400, "tokens are not taken"},
		{`{"model":"embedder","input":7}`, 400, "a string, or a list"},
		{`{"model":"embedder","input":[]}`, 400, "empty list"},
		{`{"model":"embedder"}`, 400, "a model and an input"},
		{`{"input":"a"}`, 400, "a model and an input"},
		{`{"model":"embedder","input":"12345678901234567"}`, 400, "17 bytes"},
		{`{"model":"embedder","input":"a","dimensions":4}`, 400, "the model has 3"},
		{`{"model":"embedder","input":"a","dimensions":0}`, 400, "from 1 on"},
		{`{"model":"embedder","input":"a","encoding_format":"hex"}`, 400, "float or base64"},
		{`{"model":"embedder","input":"odd"}`, 400, `"the text is odd"`},
		{`{"model":"double","input":"a"}`, 400, "makes no embeddings"},
		{`{"model":"none","input":"a"}`, 404, "model_not_found"},
		{`{"model":`, 400, "invalid_request_error"},
		{fmt.Sprintf(`{"model":"embedder","input":"a"%s}`, strings.Repeat(" ", 1<<20)), 413, "invalid_request_error"},
	} {
		status, text := r.embeddings(c.body)
		var rep struct {
			Error struct{ Message, Type string }
		}
		if err := json.Unmarshal([]byte(text), &rep); err != nil || status != c.status || !strings.Contains(text, c.says) ||
			rep.Error.Message == "" || rep.Error.Type != "invalid_request_error" {
			t.Errorf("%.60s: %d %s, want %d with %q", c.body, status, text, c.status, c.says)
		}
	}
	for path, want := range map[string]int{"/v1/models": 200, "/v1/models/embedder": 200, "/v1/models/none": 404, "/v1/embeddings": 405,
		"/v1/completions": 404} {
		if got := r.get(path); got != want {
			t.Errorf("GET %s: %d, want %d", path, got, want)
		}
	}
	r.idle()
}
