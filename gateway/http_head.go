// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"bytes"
)

// simpleHead is the head of a request for inference that has nothing out of
// the ordinary. The slices are parts of what was read.
type simpleHead struct {
	model, version []byte
	length         int64 // of the body; -1 where it comes in chunks
	chunked        bool
	headerLength   string
	authorization  []byte
}

var (
	startPost   = []byte("POST /v2/models/")
	endVersion1 = []byte(" HTTP/1.1")
	lineEnd     = []byte("\r\n")
	inferPath   = []byte("/infer")
	versionPath = []byte("/versions/")
)

// parse reads a head; false means that it is not simple, and net/http has to
// look at it. It never accepts what net/http would refuse or read otherwise.
func (h *simpleHead) parse(text []byte) bool {
	line, text, _ := bytes.Cut(text, lineEnd)
	path, ok := bytes.CutPrefix(line, startPost)
	if !ok {
		return false
	}
	if path, ok = bytes.CutSuffix(path, endVersion1); !ok {
		return false
	}
	if path, ok = bytes.CutSuffix(path, inferPath); !ok {
		return false
	}
	h.model, h.version, _ = bytes.Cut(path, versionPath)
	if !isSimple(h.model) || !isSimple(h.version) {
		return false
	}
	h.length = -1
	hosts, binary := 0, false
	for {
		if line, text, ok = bytes.Cut(text, lineEnd); !ok {
			return false
		}
		if len(line) == 0 {
			// What follows is the body. Behind one that has a length and comes in
			// chunks another request may hide from a proxy: that is net/http's.
			return (h.length >= 0) != h.chunked && hosts == 1
		}
		name, value, ok := bytes.Cut(line, []byte{':'})
		if !ok || !isToken(name) || !isText(value) {
			return false
		}
		value = bytes.Trim(value, " \t")
		switch len(name) { // most are of no interest
		case len("Host"):
			if is(name, "host") {
				hosts++
			}
		case len("Expect"):
			if is(name, "expect") {
				return false
			}
		case len("Upgrade"):
			if is(name, "upgrade") || is(name, "trailer") {
				return false
			}
		case len("Connection"):
			if is(name, "connection") && !isWord(value, "keep-alive") {
				return false
			}
		case len("Authorization"):
			if is(name, "authorization") {
				if h.authorization != nil {
					return false
				}
				h.authorization = value
			}
		case len("Content-Length"):
			if is(name, "content-length") {
				n, ok := parseInt(value)
				if !ok || n < 0 || value[0] == '-' || h.length >= 0 {
					return false
				}
				h.length = n
			}
		case len("Content-Encoding"):
			if is(name, "content-encoding") {
				return false
			}
		case len("Transfer-Encoding"):
			if is(name, "transfer-encoding") {
				if h.chunked || !isWord(value, "chunked") {
					return false
				}
				h.chunked = true
			}
		case len(headerLength):
			if is(name, "inference-header-content-length") {
				if binary {
					return false
				}
				h.headerLength, binary = string(value), true
			}
		}
	}
}

// isWord compares a header's value as net/http does: letters of ASCII only, as other
// characters fold to them, too.
func isWord(value []byte, lower string) bool { return len(value) == len(lower) && is(value, lower) }

// is compares a header's name of that length, which callers write as they like.
func is(name []byte, lower string) bool {
	for i := range name {
		c := name[i]
		if 'A' <= c && c <= 'Z' {
			c += 'a' - 'A'
		}
		if c != lower[i] {
			return false
		}
	}
	return true
}

// isSimple tells whether a part of a path means what it says.
func isSimple(p []byte) bool {
	for _, c := range p {
		if c <= ' ' || c >= 0x7f || c == '%' || c == '?' || c == '/' || c == '#' || c == '\\' {
			return false
		}
	}
	return true
}

func isToken(p []byte) bool {
	for _, c := range p {
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' && c != '_' {
			return false
		}
	}
	return len(p) > 0
}

func isText(p []byte) bool {
	for _, c := range p {
		if c < ' ' && c != '\t' || c == 0x7f {
			return false
		}
	}
	return true
}

// isPlain tells whether a head is one of the protocol's own questions, which
// are answered here: GET or POST of something below /v2, in one piece.
func isPlain(text []byte) bool {
	line, rest, _ := bytes.Cut(text, lineEnd)
	if !bytes.HasSuffix(line, endVersion1) || !bytes.HasPrefix(line, []byte("GET /v2")) && !bytes.HasPrefix(line, []byte("POST /v2")) {
		return false
	}
	rest = bytes.ToLower(rest)
	for _, special := range []string{"transfer-encoding:", "content-encoding:", "expect:", "upgrade:"} {
		if bytes.Contains(rest, []byte(special)) {
			return false
		}
	}
	// A request for inference that is not simple is net/http's, however it is
	// spelt: its answer may be too large to be collected.
	return !bytes.Contains(line, inferPath) && bytes.IndexByte(line, '%') < 0
}
