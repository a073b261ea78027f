// SPDX-License-Identifier: Apache-2.0

// Statusgen writes the table of package status out for Go, C, Python and the
// documentation. It also writes the keys of package policy for Python. Run it with
//
//	go generate ./status
package main

import (
	"bytes"
	"cmp"
	"fmt"
	"go/format"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
)

// targets are the files with a generated part: everything between the line
// that contains `begin` and the line that contains `end`.
var targets = []struct {
	path  string
	write func(*bytes.Buffer)
}{
	{"python/ringbatch/worker/policy.py", pythonKeys},
	{"status/codes.go", goConstants},
	{"cbindings/ringbatch.h", cEnum},
	{"cbindings/src/status.c", cTable},
	{"python/ringbatch/errors.py", pythonClasses},
	{"docs/errors.md", markdown},
}

const (
	begin = "written by `go generate ./status`"
	end   = "END "
)

func main() {
	if err := generate("..", os.WriteFile); err != nil { // go generate runs in status
		fmt.Fprintln(os.Stderr, "statusgen:", err)
		os.Exit(1)
	}
}

// generate calls write for each file whose generated part is not up to date.
func generate(root string, write func(path string, text []byte, mode os.FileMode) error) error {
	for _, t := range targets {
		path := filepath.Join(root, t.path)
		old, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		text, err := replace(old, t.write)
		if err == nil && strings.HasSuffix(t.path, ".go") {
			text, err = format.Source(text)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", t.path, err)
		}
		if !bytes.Equal(old, text) {
			if err := write(path, text, 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}

// replace replaces the part between the markers.
func replace(old []byte, write func(*bytes.Buffer)) ([]byte, error) {
	before, rest, found := bytes.Cut(old, []byte(begin))
	marker, rest, more := bytes.Cut(rest, []byte("\n"))
	at := bytes.Index(rest, []byte(end))
	if !found || !more || at < 0 {
		return nil, fmt.Errorf("no lines with %q and %q", begin, end)
	}
	at = bytes.LastIndexByte(rest[:at], '\n') + 1 // the marker's own line stays
	var out bytes.Buffer
	out.Write(before)
	out.WriteString(begin)
	out.Write(marker)
	out.WriteByte('\n')
	write(&out)
	out.Write(rest[at:])
	return out.Bytes(), nil
}

// byGroup lists the statuses besides OK, group by group.
func byGroup() []status.Code {
	order := []status.Group{status.Ends, status.Connecting, status.Using}
	list := status.All()[1:]
	slices.SortStableFunc(list, func(x, y status.Code) int {
		return cmp.Compare(slices.Index(order, x.Group()), slices.Index(order, y.Group()))
	})
	return list
}

// columns is how long a line may be.
const columns = 140

// grouped writes a line for each status, with a comment before each group and
// the statuses' own comments below one another.
func grouped(out *bytes.Buffer, open, shut string, line func(status.Code) string) {
	list := byGroup()
	for i, s := range list {
		if i == 0 || s.Group() != list[i-1].Group() {
			fmt.Fprintf(out, "\n\t%s%s%s\n", open, s.Group(), shut)
		}
		width := 0
		for _, other := range list {
			if other.Group() == s.Group() {
				width = max(width, len(line(other)))
			}
		}
		text := fmt.Sprintf("\t%-*s %s%s%s\n", width, line(s), open, s.Meaning(), shut)
		if len(text) > columns {
			text = fmt.Sprintf("\t%s%s%s\n\t%s\n", open, s.Meaning(), shut, line(s))
		}
		out.WriteString(text)
	}
}

func goConstants(out *bytes.Buffer) {
	out.WriteString("\tOK Code = 0\n")
	grouped(out, "// ", "", func(s status.Code) string { return fmt.Sprintf("Err%s Code = %d", s.Name(), uint8(s)) })
}

// constant is a status's name in C: QueueFull becomes RB_ERR_QUEUE_FULL.
func constant(s status.Code) string {
	if s == 0 {
		return "RB_OK"
	}
	var b strings.Builder
	b.WriteString("RB_ERR_")
	lower := false
	for _, r := range s.Name() {
		upper := r >= 'A' && r <= 'Z'
		if upper && lower {
			b.WriteByte('_')
		}
		lower = !upper
		b.WriteRune(r)
	}
	return strings.ToUpper(b.String())
}

func cEnum(out *bytes.Buffer) {
	out.WriteString("\tRB_OK = 0,\n")
	grouped(out, "/* ", " */", func(s status.Code) string { return fmt.Sprintf("%s = %d,", constant(s), uint8(s)) })
	fmt.Fprintf(out, "\n\tRB_STATUS_COUNT = %d /* not a status */\n", len(status.All()))
}

func cTable(out *bytes.Buffer) {
	for _, s := range status.All() {
		line := "\t[%s] = {%s, %s, %t, %t},\n"
		if len(line)+len(constant(s))+len(s.Name())+len(s.Error()) > columns {
			line = "\t[%s] = {%s,\n\t\t%s, %t, %t},\n"
		}
		fmt.Fprintf(out, line, constant(s), strconv.Quote(s.Name()), strconv.Quote(s.Error()),
			status.Retryable(s), status.RetryAttach(s))
	}
}

// pythonKind is Python's own word for an error, where it has one: code that
// catches that catches ours too.
var pythonKind = map[string]string{
	"Expired": "TimeoutError", "QueueTimeout": "TimeoutError", "Timeout": "TimeoutError",
	"Draining": "ConnectionError", "BrokerGone": "ConnectionError", "NoBroker": "ConnectionError", "TooManyConnections": "ConnectionError",
	"NoDescriptors": "OSError", "Forbidden": "PermissionError", "NoMemory": "MemoryError", "UnknownModel": "LookupError",
	"Version": "RuntimeError", "Closed": "RuntimeError", "Released": "RuntimeError", "Forked": "RuntimeError",
	"DType": "TypeError", "TooLarge": "ValueError", "Invalid": "ValueError", "Shape": "ValueError",
	"Rows": "ValueError", "Size": "ValueError", "NoLevel": "ValueError",
}

// pythonColumns is how long a line of Python may be.
const pythonColumns = 120

func pythonClasses(out *bytes.Buffer) {
	for _, s := range status.All()[1:] {
		base := "Error"
		if kind := pythonKind[s.Name()]; kind != "" {
			base += ", " + kind
		}
		base += fmt.Sprintf(", status=%d", uint8(s))
		if status.Retryable(s) {
			base += ", retryable=True"
		}
		if status.RetryAttach(s) {
			base += ", retry_attach=True"
		}
		m := s.Meaning()
		fmt.Fprintf(out, "\n\nclass %s(%s):\n    \"\"\"%s%s.\"\"\"\n", s.Name(), base, strings.ToUpper(m[:1]), m[1:])
	}
	names := []string{"Error", "ForkedClient"}
	for _, s := range status.All()[1:] {
		names = append(names, s.Name())
	}
	slices.Sort(names)
	out.WriteString("\n\n__all__ = [")
	column := pythonColumns
	for _, name := range names {
		if column += len(name) + len(`"", `); column > pythonColumns {
			out.WriteString("\n   ")
			column = len("    ") + len(name) + len(`"",`)
		}
		fmt.Fprintf(out, " %q,", name)
	}
	out.WriteString("\n")
	out.WriteString("]\n\n")
}

func pythonKeys(out *bytes.Buffer) {
	out.WriteString("KEYS = {\n")
	for _, k := range policy.Keys() {
		fmt.Fprintf(out, "    %q: %q,\n", k.Name, k.Kind)
	}
	out.WriteString("}\n")
}

func markdown(out *bytes.Buffer) {
	out.WriteString("\n| number | name | meaning | what to do | send again | attach again |\n|---|---|---|---|---|---|\n")
	yes := map[bool]string{true: "yes"}
	for _, s := range status.All() {
		meaning, _, _ := strings.Cut(s.Error(), "; ") // the rest is advice, as in the next column
		fmt.Fprintf(out, "| %d | %s | %s | %s | %s | %s |\n", uint8(s), s.Name(), meaning, remedies[s.Name()],
			yes[status.Retryable(s)], yes[status.RetryAttach(s)])
	}
	out.WriteByte('\n')
}
