// SPDX-License-Identifier: Apache-2.0

// Package progress is for commands that take minutes: a line on the terminal about the
// current step, checks of output files before the start, the last output of a process.
package progress

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// ErrInterrupted is the error of work that the user has interrupted.
var ErrInterrupted = errors.New("interrupted")

// Line is a line on the terminal. If standard error is no terminal, it prints nothing.
type Line struct {
	mu    sync.Mutex
	out   *os.File
	dirty bool
}

// New returns a line on standard error.
func New() *Line {
	p := &Line{}
	if _, err := unix.IoctlGetTermios(int(os.Stderr.Fd()), unix.TCGETS); err == nil {
		p.out = os.Stderr
	}
	return p
}

// Say replaces the line.
func (p *Line) Say(format string, a ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.out == nil {
		return
	}
	width := 0
	if size, err := unix.IoctlGetWinsize(int(p.out.Fd()), unix.TIOCGWINSZ); err == nil {
		width = int(size.Col)
	}
	fmt.Fprint(p.out, "\r\x1b[K"+fit(fmt.Sprintf(format, a...), width))
	p.dirty = true
}

// fit cuts a text to one line of a terminal: a wrapped line could not be replaced. A width
// of 0 is unknown.
func fit(text string, width int) string {
	if letters := []rune(text); width > 0 && len(letters) >= width { // the last column is the cursor's
		return string(letters[:max(0, width-2)]) + "…"
	}
	return text
}

// Clear erases the line. Call it before other output.
func (p *Line) Clear() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.dirty {
		fmt.Fprint(p.out, "\r\x1b[K")
		p.dirty = false
	}
}

// CanWrite checks, before minutes of measuring, that a file can be written. It does not
// change the file, so an interrupted run leaves it as it was. It accepts "".
func CanWrite(path string) error {
	if path == "" {
		return nil
	}
	st, err := os.Stat(path)
	switch {
	case err == nil && st.IsDir():
		err = syscall.EISDIR
	case err == nil:
		err = unix.Access(path, unix.W_OK)
	case errors.Is(err, fs.ErrNotExist):
		err = unix.Access(filepath.Dir(path), unix.W_OK|unix.X_OK)
	}
	if err != nil {
		return fmt.Errorf("%s cannot be written: %w", path, err)
	}
	return nil
}

// tailBytes is the most bytes that a Tail keeps.
const tailBytes = 64 << 10

// Tail is a writer that keeps the end of a process's output. The zero value is ready.
type Tail struct {
	mu  sync.Mutex
	end []byte
}

func (t *Tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.end = append(t.end, b...)
	if over := len(t.end) - tailBytes; over > 0 {
		t.end = append(t.end[:0], t.end[over:]...)
	}
	return len(b), nil
}

func (t *Tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(bytes.TrimSpace(t.end))
}
