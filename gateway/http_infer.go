// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"compress/gzip"
	"compress/zlib"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
)

// infer answers POST /v2/models/NAME[/versions/VERSION]/infer.
func (d httpDoor) infer(w http.ResponseWriter, r *http.Request, who *caller, path []string) error {
	if len(path) < 4 || path[0] != "v2" || path[1] != "models" {
		return d.other(w, r)
	}
	name, version, rest := modelPath(path[2:])
	if len(rest) != 1 {
		return d.other(w, r)
	}
	if err := d.g.begin(who); err != nil {
		return err
	}
	defer d.g.end(who)
	k, as, err := d.g.models.get(r.Context(), name, version)
	if err != nil {
		return err
	}
	b := bodies.Get().(*body)
	defer b.done()
	c := newCall()
	defer c.done()
	c.model, c.as, c.caller = k, as, who
	err = d.inferCall(w, r, c, b)
	c.count(err)
	return err
}

// inferCall reads the request, runs it, and writes the answer.
func (d httpDoor) inferCall(w http.ResponseWriter, r *http.Request, c *call, b *body) error {
	if err := c.admitBody(r.ContentLength); err != nil {
		return err
	}
	if err := b.open(c, r.Body, r.ContentLength, r.Header.Get("Content-Encoding")); err != nil {
		return err
	}
	defer b.close()
	if err := b.read(c, r.Header.Get(headerLength)); err != nil {
		return err
	}
	if err := c.check(); err != nil {
		return err
	}
	watch := watchOf(r.Context())
	c.watch, c.onFilled = watch, watch.bodyRead // from here on it is not the caller who is slow
	if err := c.run(r.Context()); err != nil {
		return err
	}
	return c.writeHTTP(w, watch, b)
}

// writeHTTP sends the answer: its JSON, and then the tensors from the slots.
func (c *call) writeHTTP(w http.ResponseWriter, watch *watch, b *body) error {
	if err := c.writeRegions(); err != nil {
		return err
	}
	if n := c.mostJSONBytes(); n > smallBuffer {
		if err := c.take(n); err != nil {
			return err
		}
	}
	text, binary := c.appendAnswer(b.text[:0])
	b.text = text
	h := w.Header()
	h["Content-Type"] = typeJSON
	if binary > 0 {
		h["Content-Type"] = typeBinary
		h[headerLength] = []string{strconv.Itoa(len(text))}
	}
	h["Content-Length"] = []string{strconv.Itoa(len(text) + binary)}
	watch.beginAnswer(c.ended, len(text)+binary)
	defer watch.endAnswer()
	if binary <= smallAnswer { // one write
		c.eachBinary(func(p []byte) { text = append(text, p...) })
		b.text = text
	}
	_, err := w.Write(text)
	if binary > smallAnswer {
		c.eachBinary(func(p []byte) {
			if err == nil {
				_, err = w.Write(p)
			}
		})
	}
	return nil // if it could not be written, nobody is left to be told
}

// Up to here copying an answer costs less than another system call.
const smallAnswer = 4 << 10

// body is a request's body, with memory for its JSON and that of the answer.
type body struct {
	g      *Gateway
	source bodySource
	length int64 // of the body, decompressed; -1 unknown
	text   []byte
	taken  int // bytes of the budget
	unzip  io.Closer
}

var bodies = sync.Pool{New: func() any { return new(body) }}

func (b *body) open(c *call, r io.Reader, length int64, encoding string) error {
	b.g, b.length = c.model.g, length
	b.source.r = r
	switch strings.ToLower(encoding) {
	case "", "identity":
	case "gzip":
		z, err := gzip.NewReader(r)
		if err != nil {
			return unzipError("gzip", err)
		}
		b.source.r, b.unzip, b.length = z, z, -1
	case "deflate":
		z, err := zlib.NewReader(r)
		if err != nil {
			return unzipError("deflate", err)
		}
		b.source.r, b.unzip, b.length = z, z, -1
	default:
		return refuse(http.StatusUnsupportedMediaType, 3, "Content-Encoding %q: gzip and deflate are known", encoding)
	}
	if b.length < 0 {
		b.source.r, b.source.open = &limited{b.source.r, c, int64(b.g.cfg.MaxMessageBytes)}, true
	}
	return nil
}

// unzipError is why a body cannot be decompressed from its beginning.
func unzipError(encoding string, err error) error {
	if isTimeout(err) {
		return errSlowBody
	}
	return badRequest("the body is no %s: %v", encoding, err)
}

func (b *body) close() {
	if b.unzip != nil {
		b.unzip.Close()
	}
	if b.taken > 0 {
		b.g.budget.giveBack(b.taken)
	}
	b.source, b.unzip, b.taken = bodySource{}, nil, 0
}

func (b *body) done() {
	if cap(b.text) > smallBuffer {
		b.text = nil
	}
	bodies.Put(b)
}

// limited is a body of unknown length: it is counted as the caller's when it
// comes.
type limited struct {
	r    io.Reader
	call *call
	left int64
}

func (l *limited) Read(p []byte) (int, error) {
	if l.left == 0 {
		var one [1]byte
		n, err := l.r.Read(one[:])
		if n > 0 {
			most := l.call.model.g.cfg.MaxMessageBytes
			return 0, tooLarge(int64(most)+1, most)
		}
		return 0, err
	}
	n, err := l.r.Read(p[:min(int64(len(p)), l.left)])
	l.left -= int64(n)
	if full := l.call.takeFromCaller(n); full != nil {
		return 0, full
	}
	return n, err
}

// read reads the JSON; what follows stays in the body.
func (b *body) read(c *call, header string) error {
	if header == "" {
		if err := b.readAll(); err != nil {
			return err
		}
		_, err := c.readJSON(b.text, nil)
		return err
	}
	n, err := strconv.ParseInt(header, 10, 64)
	switch {
	case err != nil || n < 0:
		return badRequest("header %s: %q is no length", headerLength, header)
	case b.length >= 0 && n > b.length:
		return badRequest("header %s: %d, the body has %d bytes", headerLength, n, b.length)
	case n > int64(b.g.cfg.MaxMessageBytes):
		return tooLarge(n, b.g.cfg.MaxMessageBytes)
	case n == 0:
		return b.rawInput(c)
	}
	if err := b.grow(int(n)); err != nil {
		return err
	}
	if err := b.source.readFull(b.text); err != nil {
		return err
	}
	binary, err := c.readJSON(b.text, &b.source)
	if err == nil && b.length >= 0 && n+int64(binary) != b.length {
		err = badRequest("%d bytes of JSON and %d of tensors are announced, the body has %d", n, binary, b.length)
	}
	return err
}

// rawInput is a body that is one tensor and nothing else.
func (b *body) rawInput(c *call) error {
	if len(c.model.sig.Inputs) != 1 || len(c.model.sig.Inputs[0].Variable) > 0 {
		return badRequest("a body without JSON is for models with one input of a fixed shape; this is %s", &c.model.sig)
	}
	spec := &c.model.sig.Inputs[0]
	size := b.length
	if size < 0 || size%int64(spec.RowBytes()) != 0 {
		return badRequest("the body is to be whole rows of %d bytes, and as long as its Content-Length says", spec.RowBytes())
	}
	in := c.addInput()
	in.name, in.dtype, in.src, in.size = spec.Name, spec.DType, &b.source, int(size)
	in.shape = append(append(in.shape, int(size)/spec.RowBytes()), spec.Shape...)
	c.binary = true
	return nil
}

// grow makes the text n bytes long; what is large is counted first.
func (b *body) grow(n int) error {
	if n > smallBuffer {
		if err := b.g.budget.take(n - b.taken); err != nil {
			return err
		}
		b.taken = n
	}
	if cap(b.text) < n {
		b.text = make([]byte, n)
	}
	b.text = b.text[:n]
	return nil
}

// readAll reads a body that is JSON as a whole.
func (b *body) readAll() error {
	if b.length >= 0 {
		if err := b.grow(int(b.length)); err != nil {
			return err
		}
		return b.source.readFull(b.text)
	}
	b.text = b.text[:0]
	for {
		if len(b.text) == cap(b.text) {
			n := len(b.text)
			more := append([]byte(nil), b.text...)
			if err := b.grow(max(4<<10, 2*n)); err != nil {
				return err
			}
			b.text = b.text[:copy(b.text, more)]
		}
		n, err := b.source.r.Read(b.text[len(b.text):cap(b.text)])
		b.text = b.text[:len(b.text)+n]
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return bodyError(err)
		}
	}
}

// admitBody counts a body that is as long as announced; -1 is a length that
// only its end tells.
func (c *call) admitBody(length int64) error {
	if most := c.model.g.cfg.MaxMessageBytes; length > int64(most) {
		return tooLarge(length, most)
	}
	return c.takeFromCaller(int(max(0, length)))
}

// takeFromCaller counts bytes of a request as its caller's, until release.
func (c *call) takeFromCaller(n int) error {
	if err := c.model.g.callers.take(c.caller.use, n, c.callerBytes); err != nil {
		return err
	}
	c.callerBytes += n
	return nil
}
