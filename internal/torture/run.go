// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/ringbatch/ringbatch/internal/chaos"
)

// Options choose what is run.
type Options struct {
	Parts   []Part
	Bin     string        // folder with chaos and the test binaries
	Dir     string        // folder for the results
	Cores   int           // to use
	Limit   time.Duration // start no slice that would not end by then; 0: no limit
	Scale   float64       // of every target; 1: the whole
	Out     io.Writer
	results string
}

// torture is one run.
type torture struct {
	Options
	began time.Time

	mu      sync.Mutex
	left    map[string][]Slice
	running map[*running]bool
	rate    map[string]float64 // events a second, of one slice
	failed  int
}

// running is a slice under way.
type running struct {
	Slice
	began time.Time
	done  int
}

// ResultsFile is where a run in dir keeps what its slices came to.
func ResultsFile(dir string) string { return filepath.Join(dir, "done.jsonl") }

// Run runs what is left of some parts and returns how many slices failed.
func Run(ctx context.Context, o Options) (failed int, err error) {
	if err := os.MkdirAll(o.Dir, 0o755); err != nil {
		return 0, err
	}
	o.results = ResultsFile(o.Dir)
	before, err := readDone(o.results)
	if err != nil {
		return 0, err
	}
	t := &torture{Options: o, began: time.Now(), left: map[string][]Slice{}, running: map[*running]bool{}, rate: map[string]float64{}}
	t.plan(before)
	stop := t.report()
	defer stop()
	for i := range t.Parts {
		p := &t.Parts[i]
		jobs := t.jobs(p)
		var wg sync.WaitGroup
		errs := make(chan error, jobs)
		for range jobs {
			wg.Go(func() {
				for {
					s, ok := t.next(ctx, p)
					if !ok {
						return
					}
					if err := t.slice(ctx, p, s); err != nil {
						errs <- err
						return
					}
				}
			})
		}
		wg.Wait()
		close(errs)
		if err := <-errs; err != nil {
			return t.failed, err
		}
	}
	return t.failed, ctx.Err()
}

// jobs is how many slices of a part run at once.
func (t *torture) jobs(p *Part) int {
	if p.Cores == 0 {
		return 1
	}
	return max(1, t.Cores/p.Cores)
}

// plan finds out what is left: slices of this commit that are done are not run
// again.
func (t *torture) plan(before []Done) {
	done := map[string]map[int]bool{}
	for _, d := range before {
		if d.Commit != Commit {
			continue
		}
		if done[d.Slice.Part] == nil {
			done[d.Slice.Part] = map[int]bool{}
		}
		done[d.Slice.Part][d.Slice.Index] = true
		t.rate[d.Slice.Part] = float64(d.Result.Events) / d.Seconds
	}
	for i := range t.Parts {
		p := &t.Parts[i]
		p.Target = max(1, int(float64(p.Target)*t.Scale))
		for _, s := range p.slices() {
			if !done[p.Name][s.Index] {
				t.left[p.Name] = append(t.left[p.Name], s)
			}
		}
		if n := len(done[p.Name]); n > 0 {
			fmt.Fprintf(t.Out, "%s: %d slices are done already\n", p.Name, n)
		}
	}
}

// next takes a slice of the part that can still end in time.
func (t *torture) next(ctx context.Context, p *Part) (s Slice, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.left[p.Name]) == 0 || ctx.Err() != nil {
		return s, false
	}
	s = t.left[p.Name][0]
	if t.Limit > 0 {
		room := (t.Limit - time.Since(t.began)).Seconds()
		if p.Name == "soak" { // as long as there is time
			s.Events = min(s.Events, int(room/60)-1)
		} else if r := t.rate[p.Name]; r > 0 && float64(s.Events)/r > room {
			return s, false
		}
		if room <= 0 || s.Events <= 0 {
			return s, false
		}
	}
	t.left[p.Name] = t.left[p.Name][1:]
	return s, true
}

var (
	campaignDone = regexp.MustCompile(`: (\d+) of \d+,`)
	seedsDone    = regexp.MustCompile(`(\d+) (?:seeds, (\d+) requests|schedules in)`)
)

// slice runs one and keeps what it came to.
func (t *torture) slice(ctx context.Context, p *Part, s Slice) error {
	r := &running{Slice: s, began: time.Now()}
	t.mu.Lock()
	t.running[r] = true
	t.mu.Unlock()
	defer func() {
		t.mu.Lock()
		delete(t.running, r)
		t.mu.Unlock()
	}()
	s.report = filepath.Join(t.Dir, fmt.Sprintf("%s-%d.json", s.Part, s.Index))
	defer os.Remove(s.report)
	args := p.command(s)
	cmd := exec.Command(filepath.Join(t.Bin, args[0]), args[1:]...)
	log := &watched{each: func(line string) {
		if m := campaignDone.FindStringSubmatch(line); m != nil {
			t.mu.Lock()
			r.done, _ = strconv.Atoi(m[1])
			t.mu.Unlock()
		}
	}}
	cmd.Stdout, cmd.Stderr = log, log
	if p.Cores == 1 {
		cmd.Env = append(os.Environ(), "GOMAXPROCS=1") // it has one goroutine; the collector's would crowd the slices beside it
	}
	// Ctrl-C reaches this process alone, which passes it on; and they end with it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	exit := runInterruptibly(ctx, cmd)
	if ctx.Err() != nil {
		return nil // not a result
	}
	d := Done{Slice: s, Commit: Commit, Machine: machine(), Command: strings.Join(args, " "), Began: r.began.UTC(), Seconds: time.Since(r.began).Seconds()}
	if err := d.read(p, log.String(), exit); err != nil {
		d.Result.Failed, d.Result.Failures = d.Result.Failed+1, append(d.Result.Failures, err.Error())
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.rate[p.Name] = float64(max(1, d.Result.Events)) / d.Seconds
	if d.Result.Failed > 0 {
		t.failed++
		file := filepath.Join(t.Dir, fmt.Sprintf("failed-%s-%d.log", s.Part, s.Index))
		_ = os.WriteFile(file, []byte(log.String()), 0o644)
		fmt.Fprintf(t.Out, "FAILED: %s, slice %d: %s; all of it in %s\nagain: %s\n", s.Part, s.Index, strings.Join(d.Result.Failures, "; "), file, d.Command)
	}
	return appendDone(t.results, &d)
}

// runInterruptibly runs a command that ends by itself at SIGTERM, and is
// killed if it does not.
func runInterruptibly(ctx context.Context, cmd *exec.Cmd) error {
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan struct{})
	defer close(ended)
	go func() {
		select {
		case <-ended:
			return
		case <-ctx.Done():
			_ = cmd.Process.Signal(syscall.SIGTERM)
		}
		select {
		case <-ended:
		case <-time.After(20 * time.Second):
			_ = cmd.Process.Kill()
		}
	}()
	return cmd.Wait()
}

// read takes what the slice said of itself.
func (d *Done) read(p *Part, log string, exit error) error {
	switch p.Unit {
	case "seeds":
		m := seedsDone.FindStringSubmatch(log)
		if exit != nil || m == nil {
			return fmt.Errorf("%v: %s", exit, lastLines(log, 5))
		}
		d.Result.Events, _ = strconv.Atoi(m[1])
		d.Result.Answers, _ = strconv.Atoi(m[2])
		d.Result.Passed = d.Result.Events
		return nil
	}
	text, err := os.ReadFile(d.Slice.report)
	var results []chaos.Result
	if err == nil {
		err = json.Unmarshal(text, &results)
	}
	if err == nil && len(results) != 1 {
		err = fmt.Errorf("%d results", len(results))
	}
	if err != nil {
		return errors.Join(fmt.Errorf("%v: %s", exit, lastLines(log, 5)), err)
	}
	d.Result = results[0]
	if p.Name == "soak" {
		d.Result.Events = int(results[0].Seconds / 60)
	}
	if exit != nil && d.Result.Failed == 0 {
		return fmt.Errorf("%v: %s", exit, lastLines(log, 5))
	}
	return nil
}

func lastLines(text string, n int) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], " | ")
}

// watched keeps the log of a slice and shows its lines to each.
type watched struct {
	mu   sync.Mutex
	text strings.Builder
	part string
	each func(line string)
}

func (w *watched) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.text.Write(b)
	lines := strings.Split(w.part+string(b), "\n")
	w.part = lines[len(lines)-1]
	for _, line := range lines[:len(lines)-1] {
		w.each(line)
	}
	return len(b), nil
}

func (w *watched) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.text.String()
}
