// SPDX-License-Identifier: Apache-2.0

package httpapi

import (
	"compress/gzip"
	"compress/zlib"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/ringbatch/ringbatch/gateway/core"
)

// body is a request's body, with memory for the JSON of request and answer.
type body struct {
	g      *core.Gateway
	source core.BodySource
	length int64 // decompressed; -1: unknown
	text   []byte
	ahead  []byte // see readAhead
	unzip  io.Closer
	begun  bool // an event was sent
}

var bodies = sync.Pool{New: func() any { return new(body) }}

func (b *body) open(c httpCall, r io.Reader, length int64, encoding string) error {
	b.g, b.length = c.Model.G, length
	b.source.R = r
	switch strings.ToLower(encoding) {
	case "", "identity":
	case "gzip":
		z, err := gzip.NewReader(r)
		if err != nil {
			return unzipError("gzip", err)
		}
		b.source.R, b.unzip, b.length = z, z, -1
	case "deflate":
		z, err := zlib.NewReader(r)
		if err != nil {
			return unzipError("deflate", err)
		}
		b.source.R, b.unzip, b.length = z, z, -1
	default:
		return core.Refuse(http.StatusUnsupportedMediaType, 3, "Content-Encoding %q: gzip and deflate are known", encoding)
	}
	if b.length < 0 {
		b.source.R, b.source.Open = http.MaxBytesReader(nil, io.NopCloser(b.source.R), int64(b.g.Cfg.MaxMessageBytes)), true
	}
	return nil
}

// unzipError explains a body that is not compressed as its header says.
func unzipError(encoding string, err error) error {
	if core.IsTimeout(err) {
		return core.ErrSlowBody
	}
	return core.BadRequest("the body is no %s: %v", encoding, err)
}

func (b *body) close() {
	if b.unzip != nil {
		b.unzip.Close()
	}
	b.source, b.unzip = core.BodySource{}, nil
}

func (b *body) done() {
	if cap(b.text) > core.SmallBuffer {
		b.text = nil
	}
	b.begun = false
	bodies.Put(b)
}

// read reads the JSON, and leaves the tensors in the body.
func (b *body) read(c httpCall, header string) error {
	if header == "" {
		if err := b.readText(c, b.length); err != nil {
			return err
		}
		_, err := c.readJSON(b.text, nil)
		return err
	}
	n, err := strconv.ParseInt(header, 10, 64)
	switch {
	case err != nil || n < 0:
		return core.BadRequest("header %s: %q is no length", headerLength, header)
	case b.length >= 0 && n > b.length:
		return core.BadRequest("header %s: %d, the body has %d bytes", headerLength, n, b.length)
	case n > int64(b.g.Cfg.MaxMessageBytes):
		return core.TooLarge(n, b.g.Cfg.MaxMessageBytes)
	case n == 0:
		return b.rawInput(c)
	}
	if err := b.readText(c, n); err != nil {
		return err
	}
	binary, err := c.readJSON(b.text, &b.source)
	if err == nil && b.length >= 0 && n+int64(binary) != b.length {
		err = core.BadRequest("%d bytes of JSON and %d of tensors are announced, the body has %d", n, binary, b.length)
	}
	return err
}

// rawInput takes the whole body for one tensor.
func (b *body) rawInput(c httpCall) error {
	if len(c.Model.Sig.Inputs) != 1 || len(c.Model.Sig.Inputs[0].Variable) > 0 {
		return core.BadRequest("a body without JSON is for models with one input of a fixed shape; this is %s", &c.Model.Sig)
	}
	spec := &c.Model.Sig.Inputs[0]
	size := b.length
	if size < 0 || size%int64(spec.RowBytes()) != 0 {
		return core.BadRequest("the body is to be whole rows of %d bytes, and as long as its Content-Length says", spec.RowBytes())
	}
	in := c.AddInput()
	in.Name, in.DType, in.Src, in.Size = spec.Name, spec.DType, &b.source, int(size)
	in.Shape = append(append(in.Shape, int(size)/spec.RowBytes()), spec.Shape...)
	c.Binary = true
	return nil
}

func (b *body) readText(c httpCall, n int64) (err error) {
	b.text, err = c.ReadCounted(&b.source, b.text[:0], int(n))
	return err
}

// readAhead reads up to SmallBuffer bytes of the tensors before a slot is claimed: a
// caller that does not send its body gets no slot. It reports whether the body is
// read completely.
func (b *body) readAhead(c httpCall) (whole bool, err error) {
	size := 0
	for i := range c.Inputs {
		if c.Inputs[i].Src == &b.source {
			size += c.Inputs[i].Size
		}
	}
	n := min(size, core.SmallBuffer)
	b.ahead = slices.Grow(b.ahead[:0], n)[:n]
	if err := b.source.ReadFull(b.ahead); err != nil {
		return false, err
	}
	if n == size {
		if err := b.source.Finish(); err != nil {
			return false, err
		}
	}
	b.source.Ahead = b.ahead
	return n == size, nil
}

// pacedBody is a body that has to arrive within Pace.Body, and a second more for each
// Pace.Rate of bytes. ReadTimeout is its first deadline.
type pacedBody struct {
	r       io.Reader
	control *http.ResponseController
	pace    *core.Pace
	until   time.Time
	got     int // bytes since until was moved
}

func newPacedBody(w http.ResponseWriter, r *http.Request, p *core.Pace) *pacedBody {
	return &pacedBody{r: r.Body, control: http.NewResponseController(w), pace: p, until: time.Now().Add(p.Body)}
}

func (b *pacedBody) Read(p []byte) (int, error) {
	n, err := b.r.Read(p)
	if b.got += n; b.got >= b.pace.Rate {
		b.until = b.until.Add(time.Duration(b.got) * time.Second / time.Duration(b.pace.Rate))
		b.got = 0
		_ = b.control.SetReadDeadline(b.until)
	}
	return n, err
}

// restart renews the caller's time after the gateway made it wait.
func (b *pacedBody) restart() {
	b.until = time.Now().Add(b.pace.Body)
	_ = b.control.SetReadDeadline(b.until)
}

// endPace removes the deadline. From here on the gateway reads only to notice that
// the caller hangs up.
func (b *pacedBody) endPace() { _ = b.control.SetReadDeadline(time.Time{}) }
