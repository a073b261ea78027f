// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

// driver is testdata/driver.c with the Go packages.
type driver struct {
	client   *client.Client
	requests [32]client.Request
	worker   *worker.Worker
	batch    *worker.Batch
	held     [8]*worker.Batch

	shown [64]int // see show

	sequences [8]*client.Sequence
}

func drive() {
	var d driver
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		fmt.Println(d.do(lines.Text()))
	}
}

func name(err error) string {
	var code status.Code
	switch {
	case err == nil:
		return "OK"
	case errors.As(err, &code):
		return code.Name()
	case errors.Is(err, context.DeadlineExceeded):
		return "Timeout"
	}
	return err.Error()
}

func milliseconds(text string) time.Duration {
	n, _ := strconv.Atoi(text)
	if strings.HasPrefix(text, "-") {
		return time.Hour
	}
	return time.Duration(n) * time.Millisecond
}

func (d *driver) do(line string) string {
	what, rest, _ := strings.Cut(line, " ")
	r := &d.requests[0]
	if strings.HasPrefix(rest, "r") && len(rest) > 1 && rest[1] >= '0' && rest[1] <= '9' {
		var at string
		at, rest, _ = strings.Cut(rest[1:], " ")
		n, _ := strconv.Atoi(at)
		r = &d.requests[n%len(d.requests)]
	}
	n, _ := strconv.Atoi(rest)
	switch what {
	case "connect":
		return name(d.connect(rest))
	case "claim":
		return name(d.claim(r, strings.Fields(rest)))
	case "crowd":
		return d.crowd(strings.Fields(rest))
	case "moved":
		return name(d.moved(rest))
	case "fill":
		return name(d.fill(r, rest))
	case "level":
		return name(r.SetPriority(n))
	case "commit":
		ctx := context.Background()
		if t := milliseconds(rest); t > 0 && t < time.Hour {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, t)
			defer cancel()
		}
		return name(r.Commit(ctx))
	case "wait":
		return name(testbed.WaitFor(r, milliseconds(rest)))
	case "poll":
		return name(r.Poll())
	case "cancel":
		return name(r.Cancel())
	case "release":
		return name(r.Release())
	case "stream":
		err := r.SetParts(rest != "once")
		if err == nil {
			err = r.Commit(context.Background())
		}
		return name(err)
	case "part":
		return nextPart(r, milliseconds(rest))
	case "show":
		return name(d.show(rest))
	case "out":
		return d.out(r)
	case "reason":
		return fmt.Sprint(r.Poll())
	case "version":
		return d.version(r)
	case "open", "begin", "step", "state", "undo", "reset", "copy", "end":
		return d.doSequence(what, rest)
	case "text": // one for each row, with | between them
		return name(d.text(r, strings.Split(rest, "|")))
	case "texts":
		return d.texts(r)
	case "spoil":
		x, err := r.Input(d.client.Model().Signature.Inputs[0].Name)
		if err == nil {
			copy(x.Data, "\xc3(")
		}
		return name(err)
	case "close":
		for _, r := range d.requests { // as rb_close does
			_ = r.Release()
		}
		return name(d.client.Close())
	case "attach":
		return name(d.attach(rest))
	case "next":
		return d.next(milliseconds(rest))
	case "answer":
		return name(d.answer())
	case "sum":
		return name(d.sum())
	case "exclaim", "row", "run", "spoilt", "unpack", "complete":
		return d.part(what, n)
	case "sizes":
		return name(d.batch.SetOutputDims(0, n))
	case "rounds":
		d.batch.SetRounds(uint32(n))
		return "OK"
	case "wanted":
		if !d.batch.Waiting(0) {
			return "Canceled"
		}
		return "OK"
	case "hold":
		d.held[n%len(d.held)] = d.batch
		return "OK"
	case "take":
		d.batch = d.held[n%len(d.held)]
		return "OK"
	case "fail":
		d.batch.FailAll(errors.New(rest))
		d.batch.Complete()
		return "OK"
	case "detach":
		d.worker.Close()
		return "OK"
	}
	return "no command " + what
}

func (d *driver) connect(rest string) (err error) {
	model, window, _ := strings.Cut(rest, " ")
	n, _ := strconv.Atoi(window)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	d.client, err = client.Dial(ctx, model, client.WithWindow(n))
	return err
}

func (d *driver) claim(r *client.Request, fields []string) error {
	rows, _ := strconv.Atoi(fields[0])
	var dims []int
	for _, f := range fields[2:] {
		n, _ := strconv.Atoi(f)
		dims = append(dims, n)
	}
	got, err := d.client.TryClaim(rows, dims...)
	if t := milliseconds(fields[1]); t > 0 && err != nil && (errors.Is(err, status.ErrFull) || errors.Is(err, status.ErrBrokerGone)) {
		ctx, cancel := context.WithTimeout(context.Background(), t)
		defer cancel()
		got, err = d.client.Claim(ctx, rows, dims...)
	}
	if err == nil {
		*r = got
	}
	return err
}

// moved claims until the client is attached to the model of that name, or a claim fails.
func (d *driver) moved(to string) error {
	for range 10000 {
		there := d.client.Model().Name == to // before the claim: it may move between the two
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		r, err := d.client.Claim(ctx, 1)
		cancel()
		if err != nil {
			return err
		}
		_ = r.Release()
		if there {
			break
		}
		time.Sleep(time.Millisecond)
	}
	return nil
}

// crowd claims those rows a few times beside goroutines that claim one row again and again.
func (d *driver) crowd(fields []string) string {
	var n [3]int // goroutines, claims, rows
	for i := range n {
		n[i], _ = strconv.Atoi(fields[i])
	}
	var wg sync.WaitGroup
	var enough atomic.Bool
	served := make([]int, n[0])
	for i := range served {
		wg.Go(func() {
			for !enough.Load() {
				r, _ := d.client.Claim(context.Background(), 1)
				time.Sleep(100 * time.Microsecond)
				_ = r.Release()
				served[i]++
			}
		})
	}
	var err error
	for range n[1] {
		var r client.Request
		if err = d.claim(&r, fields[2:]); err == nil {
			time.Sleep(time.Millisecond)
			_ = r.Release()
		}
	}
	enough.Store(true)
	wg.Wait()
	if least := slices.Min(served); least == 0 || slices.Max(served) > 10*least {
		return fmt.Sprintf("starved: %d", served)
	}
	return name(err)
}

func (d *driver) fill(r *client.Request, text string) error {
	value, _ := strconv.ParseFloat(text, 32)
	x, err := r.Input(d.client.Model().Signature.Inputs[0].Name)
	if err != nil {
		return err
	}
	for i := range x.Rows() {
		row, err := tensor.As[float32](x.Row(i))
		if err != nil {
			return err
		}
		for j := range row {
			row[j] = float32(value)
		}
	}
	return nil
}

func nextPart(r *client.Request, t time.Duration) string {
	ctx, cancel := context.WithTimeout(context.Background(), t)
	defer cancel()
	part, err := r.NextPart(ctx)
	if errors.Is(err, io.EOF) {
		return "End"
	}
	if errors.Is(err, status.ErrExpired) && errors.Is(r.Poll(), status.ErrNotDone) {
		return "Timeout" // of this wait
	}
	if err != nil {
		return name(err)
	}
	text := "OK"
	if part.Restarted {
		text = "Again"
	}
	steps, err := tensor.As[float32](part.Tensor)
	for _, x := range steps {
		text += fmt.Sprintf(" %g", x)
	}
	return cmp.Or(text, name(err))
}

// show ROW STEPS VALUE fills the row's steps up to there, and shows them.
func (d *driver) show(rest string) error {
	var row, n int
	var value float32
	if _, err := fmt.Sscan(rest, &row, &n, &value); err != nil {
		return err
	}
	if row >= d.batch.Rows() {
		return d.batch.Show(row, n)
	}
	y := worker.Row[float32](d.batch.Output(0), row)
	for j := d.shown[row]; j < min(n, len(y)); j++ {
		y[j] = value
	}
	d.shown[row] = n
	return d.batch.Show(row, n)
}

func (d *driver) out(r *client.Request) string {
	y, err := r.Output(d.client.Model().Signature.Outputs[0].Name)
	if err != nil {
		return name(err)
	}
	first := float32(0)
	if y.Shape[1] > 0 {
		row, err := tensor.As[float32](y.Row(0))
		if err != nil {
			return name(err)
		}
		first = row[0]
	}
	return fmt.Sprintf("OK %dx%d %g", y.Shape[0], y.Shape[1], first)
}

func (d *driver) text(r *client.Request, rows []string) error {
	x, err := r.Input(d.client.Model().Signature.Inputs[0].Name)
	for i := 0; i < len(rows) && err == nil; i++ {
		err = tensor.PutText(x.Row(i).Data, rows[i])
	}
	return err
}

func (d *driver) texts(r *client.Request) string {
	y, err := r.Output(d.client.Model().Signature.Outputs[0].Name)
	if err != nil {
		return name(err)
	}
	all, err := tensor.Texts(y)
	if err != nil {
		return name(err)
	}
	return "OK " + strings.Join(all, "|")
}

func (d *driver) attach(rest string) error {
	parts := append(strings.SplitN(rest, "|", 5), "", "", "") // model, signature, policy, version, lanes
	in, out, _ := strings.Cut(parts[1], "->")
	out, state, _ := strings.Cut(out, " state ")
	sig, err := tensor.ParseSignature(strings.Fields(in), strings.Fields(out), strings.Fields(state)...)
	if err != nil {
		return err
	}
	p, err := policy.Parse(parts[2])
	if err != nil {
		return err
	}
	lanes, _ := strconv.Atoi(parts[4])
	d.worker, err = worker.Attach(context.Background(), worker.Config{
		Model: parts[0], Signature: sig, Policy: p, Version: parts[3], Depth: lanes, Concurrency: lanes,
	})
	return err
}

func (d *driver) next(t time.Duration) string {
	ctx, cancel := context.WithTimeout(context.Background(), t)
	defer cancel()
	b, err := d.worker.Next(ctx)
	if err != nil {
		return name(err)
	}
	d.batch, d.shown = b, [64]int{}
	return fmt.Sprintf("OK %d requests %d rows", b.Len(), b.Rows())
}

func (d *driver) answer() error {
	for i := range d.batch.Rows() {
		d.write(i)
	}
	d.batch.Complete()
	return nil
}

// part does one part of a batch's work.
func (d *driver) part(what string, n int) string {
	switch what {
	case "exclaim": // answers each text with two marks behind it
		for i := range d.batch.Rows() {
			d.batch.Output(0).SetTexts(i, d.batch.Input(0).Texts(i)[0]+"!!")
		}
		d.batch.Complete()
	case "spoilt":
		for i := range d.batch.Rows() {
			copy(d.batch.Output(0).Bytes(i), "\xc3(")
		}
	case "row": // writes one row, as answer does for all
		d.write(n)
	case "run":
		r := d.batch.Runs()[n]
		y, err := tensor.As[float32](d.batch.Output(0).Run(n))
		for j := range y {
			y[j] = worker.Row[float32](d.batch.Input(0), r.Row)[0] + 1
		}
		return name(err)
	case "complete":
		if d.batch.Complete() != nil {
			return "Failed"
		}
	}
	return "OK"
}

func (d *driver) write(i int) {
	x, y := worker.Row[float32](d.batch.Input(0), i), worker.Row[float32](d.batch.Output(0), i)
	for j := range min(len(x), len(y)) {
		y[j] = x[j] + 1
	}
}
