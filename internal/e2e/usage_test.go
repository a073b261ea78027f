package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/tensor"
)

// usage is what a process has of what must not be left behind.
type usage struct {
	fds     int
	maps    int // mappings of our shared memory
	threads int
}

func usageOf(t *testing.T, pid int) (u usage) {
	t.Helper()
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range fds {
		to, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, e.Name()))
		switch {
		case to == "", strings.HasPrefix(to, "pipe:"), strings.Contains(to, "eventpoll"):
			// the Go runtime's own; they come and go
		case pid == os.Getpid() && strings.Contains(to, "pidfd"):
			// of our children
		default:
			u.fds++
		}
	}
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		t.Fatal(err)
	}
	u.maps = strings.Count(string(maps), "memfd:ringbatch-")
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		t.Fatal(err)
	}
	u.threads = len(tasks)
	return u
}

// spareThreads is how many idle threads the Go runtime may have kept.
const spareThreads = 24

func (u usage) within(most usage) error {
	if u.fds > most.fds || u.maps > most.maps || u.threads > most.threads+spareThreads {
		return fmt.Errorf("%+v, was %+v before", u, most)
	}
	return nil
}

// nonce is unlike any other request's of this process.
var nonce atomic.Int64

// ask runs one request and checks every number of its answer.
func ask(ctx context.Context, c *client.Client, cmd, arg int64, rows int) error {
	return askSized(ctx, c, width, cmd, arg, rows)
}

func askSized(ctx context.Context, c *client.Client, width int, cmd, arg int64, rows int) error {
	x := make([]int64, width*rows)
	n := nonce.Add(1)
	rng := rand.New(rand.NewSource(n))
	for r := range rows {
		row := x[r*width : (r+1)*width]
		for j := range row {
			row[j] = rng.Int63() >> 3
		}
		row[0], row[1], row[2] = 0, n, arg
	}
	x[0] = cmd
	outs, err := c.Infer(ctx, x)
	if err != nil {
		return err
	}
	y, err := tensor.As[int64](outs[0])
	if err != nil {
		return err
	}
	for i := range x {
		if want := answer(x[i], i%width); y[i] != want {
			return fmt.Errorf("%w: row %d, element %d is %d, not %d", errWrongBytes, i/width, i%width, y[i], want)
		}
	}
	return nil
}

var errWrongBytes = errors.New("wrong bytes")

// asking is a request under way.
type asking chan error

func askLater(ctx context.Context, c *client.Client, cmd, arg int64) asking {
	ch := make(asking, 1)
	go func() { ch <- ask(ctx, c, cmd, arg, 1) }()
	return ch
}

// ends waits for the request's one end and compares it with want, nil being a
// correct answer.
func (a asking) ends(t *testing.T, want error) {
	t.Helper()
	select {
	case err := <-a:
		if !errors.Is(err, want) {
			t.Errorf("request ended with %v, expected %v", err, want)
		}
	case <-time.After(patience):
		t.Fatalf("request has no end, expected %v", want)
	}
}

// works sends some requests and expects correct answers.
func works(t *testing.T, c *client.Client, n int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var all []asking
	for range n {
		all = append(all, askLater(ctx, c, cmdAnswer, 0))
	}
	for _, a := range all {
		a.ends(t, nil)
	}
}

// cpuTime is what a process has used.
func cpuTime(t *testing.T, pid int) time.Duration {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+2:]))
	var user, system int64
	if _, err := fmt.Sscan(fields[11]+" "+fields[12], &user, &system); err != nil {
		t.Fatal(err)
	}
	return time.Duration(user+system) * 10 * time.Millisecond // the kernel counts in hundredths
}

// errorSays reports whether a child's line is that error.
func errorSays(line string, want error) bool {
	return strings.HasPrefix(line, "error: ") && strings.Contains(line, want.Error())
}
