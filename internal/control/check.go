// SPDX-License-Identifier: Apache-2.0

package control

import "fmt"

const (
	// maxDepth is deeper than any message of ours.
	maxDepth = 8
	// maxRequestValues is more than any acceptable request has. A value of one byte
	// becomes up to 80 bytes of decoded message in the broker's memory.
	maxRequestValues = 1 << 13
)

// check walks through a frame's body before it is decoded. The decoder would allocate
// memory for any length in the body: 22 bytes could ask for four thousand million
// elements. check refuses lengths that do not fit into the bytes of the body.
func check(body []byte, msg any) error {
	w := walk{most: len(body)} // a reply may have a long list
	if _, ok := msg.(*Request); ok {
		w.most = maxRequestValues
	}
	rest, err := w.skip(body, maxDepth)
	if err == nil && len(rest) > 0 {
		err = fmt.Errorf("%w: %d bytes after the message", ErrFrame, len(rest))
	}
	return err
}

// walk counts the values of a message.
type walk struct{ values, most int }

// skip walks over one msgpack value and returns the bytes after it.
func (w *walk) skip(b []byte, depth int) ([]byte, error) {
	switch {
	case len(b) == 0:
		return nil, fmt.Errorf("%w: message is cut short", ErrFrame)
	case depth == 0:
		return nil, fmt.Errorf("%w: message is nested more than %d deep", ErrFrame, maxDepth)
	case w.values == w.most:
		return nil, fmt.Errorf("%w: message has more than %d values", ErrFrame, w.most)
	}
	w.values++
	kind, b := b[0], b[1:]
	switch {
	case kind <= 0x7f || kind >= 0xe0: // small integers
		return b, nil
	case kind <= 0x8f:
		return w.skipValues(b, 2*uint64(kind&0x0f), depth)
	case kind <= 0x9f:
		return w.skipValues(b, uint64(kind&0x0f), depth)
	case kind <= 0xbf:
		return skipBytes(b, uint64(kind&0x1f))
	}
	switch kind {
	case 0xc0, 0xc2, 0xc3: // nil, false, true
		return b, nil
	case 0xcc, 0xd0:
		return skipBytes(b, 1)
	case 0xcd, 0xd1:
		return skipBytes(b, 2)
	case 0xca, 0xce, 0xd2:
		return skipBytes(b, 4)
	case 0xcb, 0xcf, 0xd3:
		return skipBytes(b, 8)
	case 0xd4, 0xd5, 0xd6, 0xd7, 0xd8: // fixext, with its type
		return skipBytes(b, 1+1<<(kind-0xd4))
	}
	size := 0 // of the length that follows
	switch kind {
	case 0xc4, 0xc7, 0xd9:
		size = 1
	case 0xc5, 0xc8, 0xda, 0xdc, 0xde:
		size = 2
	case 0xc6, 0xc9, 0xdb, 0xdd, 0xdf:
		size = 4
	default:
		return nil, fmt.Errorf("%w: byte %#x begins no value", ErrFrame, kind)
	}
	rest, err := skipBytes(b, uint64(size))
	if err != nil {
		return nil, err
	}
	n := uint64(0)
	for _, digit := range b[:size] { // big endian
		n = n<<8 | uint64(digit)
	}
	b = rest
	switch kind {
	case 0xdc, 0xdd:
		return w.skipValues(b, n, depth)
	case 0xde, 0xdf:
		return w.skipValues(b, 2*n, depth)
	case 0xc7, 0xc8, 0xc9:
		n++ // ext: its type
	}
	return skipBytes(b, n)
}

func skipBytes(b []byte, n uint64) ([]byte, error) {
	if n > uint64(len(b)) {
		return nil, fmt.Errorf("%w: %d bytes promised, %d are there", ErrFrame, n, len(b))
	}
	return b[n:], nil
}

func (w *walk) skipValues(b []byte, n uint64, depth int) ([]byte, error) {
	if n > uint64(len(b)) {
		return nil, fmt.Errorf("%w: %d values promised, %d bytes are there", ErrFrame, n, len(b))
	}
	var err error
	for range n {
		if b, err = w.skip(b, depth-1); err != nil {
			return nil, err
		}
	}
	return b, nil
}
