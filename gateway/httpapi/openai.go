// SPDX-License-Identifier: Apache-2.0

package httpapi

import (
	"encoding/base64"
	"encoding/binary"
	"errors"
	"math"
	"net/http"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"

	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/internal/codec"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// badText begins the failure of a text that the model does not take; see python/ringbatch/hf.
const badText = "BadText: "

// openAI answers OpenAI's paths: /v1/embeddings for models that make embeddings of text, and /v1/models.
func (d httpDoor) openAI(w http.ResponseWriter, r *http.Request, who *core.Caller, path []string) error {
	switch {
	case len(path) == 1 && path[0] == "embeddings":
		if err := checkMethod(r, toChange); err != nil {
			return err
		}
		return d.embeddings(w, r, who)
	case path[0] == "models":
		if err := checkMethod(r, toRead); err != nil {
			return err
		}
		b := []byte(`{"object":"list","data":[`)
		for i, k := range d.g.Models.List() {
			if i > 0 {
				b = append(b, ',')
			}
			b = appendModel(b, k.Name)
		}
		if b = append(b, `]}`...); len(path) > 1 {
			name := strings.Join(path[1:], "/")
			if _, _, err := d.g.Models.About(r.Context(), name, ""); err != nil {
				return err
			}
			b = appendModel(nil, name)
		}
		writeJSON(w, b)
		return nil
	}
	return core.Refuse(http.StatusNotFound, codes.NotFound, "%s %s: no such path; of OpenAI's there are /v1/embeddings and /v1/models",
		r.Method, r.URL.Path)
}

func appendModel(b []byte, name string) []byte {
	return append(codec.AppendString(append(b, `{"id":`...), name), `,"object":"model","created":0,"owned_by":"ringbatch"}`...)
}

// embeddingsRequest is the JSON of a request.
type embeddingsRequest struct {
	model      string
	texts      core.BytesSource // elements of BYTES
	rows       int
	base64     bool
	dimensions int // 0: as the model has
}

func readEmbeddings(text []byte) (q embeddingsRequest, err error) {
	s := codec.NewScanner(text)
	input := []byte(nil)
	s.Each(func(key []byte) {
		switch string(key) {
		case "model":
			q.model = string(s.Text())
		case "input":
			input = s.Skip()
		case "encoding_format":
			switch format := string(s.Text()); format {
			case "base64", "float":
				q.base64 = format == "base64"
			default:
				s.Check(core.BadRequest("encoding_format %q: want float or base64", format))
			}
		case "dimensions":
			if n := s.Integer(); n < 1 || n > math.MaxInt32 {
				s.Check(core.BadRequest("dimensions %d: want a number from 1 on", n))
			} else {
				q.dimensions = int(n)
			}
		default:
			s.Skip()
		}
	})
	if s.End(); s.Err() != nil {
		return q, s.Err()
	}
	if q.model == "" || input == nil {
		return q, core.BadRequest("an embeddings request has a model and an input")
	}
	add := func(item []byte) {
		if len(item) == 0 || item[0] != '"' {
			s.Check(core.BadRequest("input is to be a string, or a list of strings; tokens are not taken, since the worker makes them"))
			return
		}
		text := codec.NewScanner(item).Text()
		q.texts = append(binary.LittleEndian.AppendUint32(q.texts, uint32(len(text))), text...)
		q.rows++
	}
	if s = codec.NewScanner(input); input[0] == '[' {
		s.Items(func() { add(s.Skip()) })
	} else {
		add(input)
	}
	if s.Err() == nil && q.rows == 0 {
		return q, core.BadRequest("input is an empty list")
	}
	return q, s.Err()
}

// embeds returns the embeddings' width; 0: the model makes none of text.
func embeds(sig *tensor.Signature) (width int) {
	if len(sig.Inputs) != 1 || sig.Inputs[0].DType != tensor.Str || len(sig.Inputs[0].Shape) != 1 {
		return 0
	}
	tokens := false
	for _, o := range sig.Outputs {
		switch {
		case o.Name == "embedding" && o.DType == tensor.F32 && len(o.Shape) == 1 && len(o.Variable) == 0:
			width = o.Shape[0]
		case o.Name == "tokens" && o.DType == tensor.I32 && len(o.Shape) == 0:
			tokens = true
		}
	}
	if !tokens {
		return 0
	}
	return width
}

// embeddings answers POST /v1/embeddings.
func (d httpDoor) embeddings(w http.ResponseWriter, r *http.Request, who *core.Caller) error {
	if err := d.g.BeginRequest(who); err != nil {
		return err
	}
	defer d.g.EndRequest(who)
	if most := d.g.Cfg.MaxMessageBytes; r.ContentLength > int64(most) {
		return core.TooLarge(r.ContentLength, most)
	}
	b := bodies.Get().(*body)
	defer b.done()
	memory := d.g.NewMemory(who)
	defer memory.GiveBack()
	paced := newPacedBody(w, r, &d.g.Cfg.Pace)
	if err := b.open(d.g, paced, r.ContentLength, r.Header.Get("Content-Encoding")); err != nil {
		return err
	}
	defer b.close()
	var err error
	if b.text, err = memory.ReadCounted(&b.source, b.text[:0], int(b.length)); err != nil {
		return err
	}
	paced.endPace()
	if err = memory.Take(2 * len(b.text)); err != nil { // for the texts
		return err
	}
	q, err := readEmbeddings(b.text)
	if err != nil {
		return err
	}
	k, as, err := d.g.Models.Get(r.Context(), q.model, "")
	if err != nil {
		return err
	}
	c := core.NewCall(k, as, who)
	defer c.Done()
	err = d.embed(w, r, httpCall{c}, &q, paced.control)
	c.Count(err)
	return err
}

func (d httpDoor) embed(w http.ResponseWriter, r *http.Request, c httpCall, q *embeddingsRequest, control *http.ResponseController) error {
	width, rows := embeds(&c.Model.Sig), q.rows
	if width == 0 {
		return core.BadRequest("model %q makes no embeddings of text: want text:str[<=N] -> embedding:f32[D] tokens:i32[], it is %s",
			q.model, &c.Model.Sig)
	}
	if q.dimensions > width {
		return core.BadRequest("dimensions %d: the model has %d", q.dimensions, width)
	}
	in := c.AddInput()
	in.Name, in.DType, in.Src, in.Size = c.Model.Sig.Inputs[0].Name, tensor.Str, &q.texts, len(q.texts)
	in.Shape = append(in.Shape, rows)
	c.AddOutput().Name = "embedding"
	c.AddOutput().Name = "tokens"
	if err := c.Check(); err != nil {
		return err
	}
	if err := c.Run(r.Context()); err != nil {
		if text := core.TextOf(err); errors.Is(err, status.ErrFailed) && strings.HasPrefix(text, badText) {
			return core.BadRequest("%s", strings.TrimPrefix(text, badText))
		}
		return err
	}
	if n := rows * width * codec.MaxJSONBytes(tensor.F32); n > core.SmallBuffer {
		if err := c.Take(n); err != nil {
			return err
		}
	}
	vectors, tokens := joined(c.Outputs[0].Parts), joined(c.Outputs[1].Parts)
	b := []byte(`{"object":"list","data":[`)
	for i := range rows {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(append(b, `{"object":"embedding","index":`...), int64(i), 10)
		b = append(b, `,"embedding":`...)
		v := vectors[4*width*i:][:4*width]
		if q.dimensions > 0 && q.dimensions < width {
			v = shortened(v[:4*q.dimensions])
		}
		if q.base64 {
			b = append(base64.StdEncoding.AppendEncode(append(b, '"'), v), '"', '}')
		} else {
			b = append(codec.AppendJSON(append(b, '['), tensor.F32, v, true), ']', '}')
		}
	}
	used := int64(0)
	for ; len(tokens) >= 4; tokens = tokens[4:] {
		used += int64(binary.LittleEndian.Uint32(tokens))
	}
	b = append(codec.AppendString(append(b, `],"model":`...), c.ModelName()), `,"usage":{"prompt_tokens":`...)
	b = strconv.AppendInt(append(strconv.AppendInt(b, used, 10), `,"total_tokens":`...), used, 10)
	_ = control.SetWriteDeadline(c.Ended.Add(c.Model.G.AnswerTime(len(b))))
	writeJSON(w, append(b, '}', '}'))
	return nil
}

func joined(parts [][]byte) (all []byte) {
	for _, p := range parts {
		all = append(all, p...)
	}
	return all
}

// shortened gives the first numbers of an embedding the length 1, as OpenAI does.
func shortened(v []byte) []byte {
	sum := 0.0
	at := func(i int) float64 { return float64(math.Float32frombits(binary.LittleEndian.Uint32(v[i:]))) }
	for i := 0; i < len(v); i += 4 {
		sum += at(i) * at(i)
	}
	made := make([]byte, 0, len(v))
	for i := 0; i < len(v); i += 4 {
		made = binary.LittleEndian.AppendUint32(made, math.Float32bits(float32(at(i)/max(math.Sqrt(sum), math.SmallestNonzeroFloat32))))
	}
	return made
}

// openAIError is an error in OpenAI's form.
func openAIError(err error) []byte {
	kind, code := "server_error", "null"
	switch m := core.MeaningOf(err); {
	case m.HTTP == http.StatusTooManyRequests:
		kind = "rate_limit_error"
	case m.HTTP == http.StatusUnauthorized:
		kind, code = "authentication_error", `"invalid_api_key"`
	case m.HTTP == http.StatusNotFound:
		kind, code = "invalid_request_error", `"model_not_found"`
	case m.HTTP < http.StatusInternalServerError:
		kind = "invalid_request_error"
	}
	b := codec.AppendString([]byte(`{"error":{"message":`), core.TextOf(err))
	return append(append(append(append(b, `,"type":"`...), kind...), `","param":null,"code":`...), code+"}}"...)
}
