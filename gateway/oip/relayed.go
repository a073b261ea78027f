// SPDX-License-Identifier: Apache-2.0

package oip

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/tensor"
)

const (
	// RequestsParameter is a parameter of a ModelInferRequest: for each request its
	// rows, its time and its true sizes, ROWS[@MICROSECONDS][xSIZE…], separated by
	// semicolons. It is also the extension's name in the server's metadata.
	RequestsParameter = "ringbatch_requests"
	// FailedParameter is a parameter of a ModelInferResponse: the failed requests, in
	// lines of INDEX STATUS TEXT. Their rows are not in the raw contents.
	FailedParameter = "ringbatch_failed"
	// SizesParameter is a parameter of a ModelInferResponse: the sizes of variable
	// outputs, SIZExSIZE… for each row. Commas separate rows, semicolons requests.
	SizesParameter = "ringbatch_sizes"
	// SignatureHeader is a header of a ModelMetadataResponse: the model's signature,
	// with the largest sizes of variable dimensions.
	SignatureHeader = "ringbatch-signature-bin"
	// NotRunTrailer is a trailer of a failed ModelInfer: the gateway has run none of its
	// requests. Its value is the name of the reason.
	NotRunTrailer = "ringbatch-not-run"

	// MaxRequests bounds the requests of a message.
	MaxRequests = 1 << 14
)

// RelayedRequest is one request of a message.
type RelayedRequest struct {
	Rows    int
	Timeout time.Duration // 0: none
	Dims    [tensor.MaxVariableDims]uint32
}

// AppendRequest writes an entry of RequestsParameter.
func AppendRequest(b []byte, rows int, timeout time.Duration, dims []uint32) []byte {
	if len(b) > 0 {
		b = append(b, ';')
	}
	b = strconv.AppendInt(b, int64(rows), 10)
	if timeout > 0 {
		b = strconv.AppendInt(append(b, '@'), max(1, timeout.Microseconds()), 10)
	}
	return appendDims(b, dims, 'x', 'x')
}

func appendDims(b []byte, dims []uint32, first, next byte) []byte {
	for i, d := range dims {
		if i > 0 {
			b = append(b, next)
		} else if first != 0 {
			b = append(b, first)
		}
		b = strconv.AppendUint(b, uint64(d), 10)
	}
	return b
}

// ParseRequests appends the entries of RequestsParameter to list. sizes is the
// number of variable sizes of the model's inputs.
func ParseRequests(list []RelayedRequest, text []byte, sizes int) ([]RelayedRequest, error) {
	p := parser{text}
	for {
		if len(list) == MaxRequests {
			return list, fmt.Errorf("%s: more than %d requests", RequestsParameter, MaxRequests)
		}
		var q RelayedRequest
		rows, ok := p.number(MaxRequests)
		if q.Rows = int(rows); !ok || q.Rows < 1 {
			return list, p.wrong("a number of rows")
		}
		if p.take('@') {
			us, ok := p.number(uint64(24 * time.Hour / time.Microsecond))
			if !ok || us == 0 {
				return list, p.wrong("microseconds, at most a day")
			}
			q.Timeout = time.Duration(us) * time.Microsecond
		}
		for k := range sizes {
			if !p.take('x') {
				return list, p.wrong(fmt.Sprintf("%d sizes", sizes))
			}
			size, ok := p.number(1 << 31)
			if !ok {
				return list, p.wrong("a size")
			}
			q.Dims[k] = uint32(size)
		}
		list = append(list, q)
		if len(p.rest) == 0 {
			return list, nil
		}
		if !p.take(';') {
			return list, p.wrong("a semicolon")
		}
	}
}

type parser struct{ rest []byte }

func (p *parser) take(c byte) bool {
	if len(p.rest) == 0 || p.rest[0] != c {
		return false
	}
	p.rest = p.rest[1:]
	return true
}

// number reads a decimal number of at most most.
func (p *parser) number(most uint64) (n uint64, ok bool) {
	for len(p.rest) > 0 && p.rest[0] >= '0' && p.rest[0] <= '9' {
		n, ok = 10*n+uint64(p.rest[0]-'0'), true
		if n > most {
			return n, false
		}
		p.rest = p.rest[1:]
	}
	return n, ok
}

func (p *parser) wrong(want string) error {
	return fmt.Errorf("%s: want %s at %.20q", RequestsParameter, want, p.rest)
}

// AppendFailed writes a line of FailedParameter.
func AppendFailed(b []byte, i int, name, text string) []byte {
	b = strconv.AppendInt(b, int64(i), 10)
	b = append(append(append(append(b, ' '), name...), ' '), strings.ReplaceAll(strings.ToValidUTF8(text, "?"), "\n", " ")...)
	return append(b, '\n')
}

// ParseFailed reads FailedParameter.
func ParseFailed(text string, each func(i int, name, text string)) error {
	for line := range strings.Lines(text) {
		index, rest, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		i, err := strconv.Atoi(index)
		if err != nil || i < 0 {
			return fmt.Errorf("%s: no index in %.40q", FailedParameter, line)
		}
		name, why, _ := strings.Cut(rest, " ")
		each(i, name, why)
	}
	return nil
}

// AppendSizes writes the sizes of a row.
func AppendSizes(b []byte, firstOfRequest, firstOfAll bool, dims []uint32) []byte {
	switch {
	case firstOfAll:
	case firstOfRequest:
		b = append(b, ';')
	default:
		b = append(b, ',')
	}
	return appendDims(b, dims, 0, 'x')
}

// ParseSizes reads the sizes of the rows of successful requests.
func ParseSizes(text string, sizes int, each func(dims []int) error) error {
	dims := make([]int, sizes)
	for row := range strings.FieldsFuncSeq(text, func(r rune) bool { return r == ';' || r == ',' }) {
		p := parser{[]byte(row)}
		for k := range sizes {
			if k > 0 && !p.take('x') {
				return fmt.Errorf("%s: %.40q has not %d sizes", SizesParameter, row, sizes)
			}
			n, ok := p.number(1 << 31)
			if !ok {
				return fmt.Errorf("%s: no size in %.40q", SizesParameter, row)
			}
			dims[k] = int(n)
		}
		if err := each(dims); err != nil {
			return err
		}
	}
	return nil
}
