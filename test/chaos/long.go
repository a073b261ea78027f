// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// The long runs do the campaigns by the hundred thousand. A part is cut into
// slices, each with its own seeds and each a process: this program with one
// campaign, or a test binary with some seeds. The result of each slice is
// appended to a file. An interrupted run resumes from that file, and the table
// is made of that file alone.

// part is one of the long figures.
type part struct {
	name   string
	unit   string
	target int // events in all
	slice  int // events of one slice
	cores  int // that a slice keeps busy; 0: it has the machine for itself
	about  string

	command func(s Slice) []string
}

// Slice is some events of a part.
type Slice struct {
	Part   string
	Index  int
	Seed   uint64 // of a campaign; of seeds, the first
	Events int
	report string // file for its results
}

// parts in the order in which they run.
var parts = []part{
	{"clients", "client kills", 100_000, 5_000, 2, "SIGKILL of Go, C and Python clients at labelled steps and at random", campaignSlice},
	{"workers", "worker kills", 50_000, 2_500, 2, "SIGKILL of workers in the middle of batches", campaignSlice},
	{"brokers", "broker restarts", 5_000, 250, 2, "SIGKILL of the broker under load, and its restart", campaignSlice},
	{"stops", "stopped workers", 5_000, 500, 2, "SIGSTOP of workers past their lease, then SIGCONT", campaignSlice},
	{"poison", "batches", 20_000, 2_000, 2, "1 to 10 % of the inputs kill the worker that runs them", campaignSlice},
	{"simulation", "seeds", 1_000_000, 20_000, 1, "the broker's core in simulated worlds: deaths, hangs, delays, nonsense",
		seedsSlice("engine.test", "Simulated", "-seeds")},
	{"schedules", "seeds", 1_000_000, 50_000, 0, "the batcher against its reference",
		seedsSlice("batcher.test", "RandomSchedules", "-schedules")},
	{"signals", "signals", 1_000_000, 100_000, 0, "SIGURG, SIGPROF, SIGUSR1 and SIGCHLD to everybody", campaignSlice},
	{"hostile", "mutations", 1_000_000_000, 250_000_000, 0, "an attached process that breaks every rule", campaignSlice},
	{"soak", "minutes", 120, 120, 0, "everything at once, at low intensity", soakSlice},
}

// PartNames are those of the long runs.
func PartNames() (names []string) {
	for i := range parts {
		names = append(names, parts[i].name)
	}
	return names
}

func (s Slice) seed() string { return strconv.FormatUint(s.Seed, 10) }

func campaignSlice(s Slice) []string {
	return []string{"chaos", "--only", s.Part, "--events", strconv.Itoa(s.Events), "--seed", s.seed(), "--report", s.report}
}

func soakSlice(s Slice) []string {
	return []string{"chaos", "--soak", fmt.Sprint(time.Duration(s.Events) * time.Minute), "--seed", s.seed(), "--report", s.report}
}

func seedsSlice(binary, test, flag string) func(Slice) []string {
	return func(s Slice) []string {
		return []string{binary, "-test.run", test, "-test.v", "-test.timeout", "0", flag, strconv.Itoa(s.Events), "-first_seed", s.seed()}
	}
}

// slices of a part. A slice has the same seeds in every run.
func (p *part) slices() (all []Slice) {
	for done, i := 0, 0; done < p.target; i++ {
		s := Slice{Part: p.name, Index: i, Seed: uint64(i + 1), Events: min(p.slice, p.target-done)}
		if p.unit == "seeds" {
			s.Seed = uint64(done + 1)
		}
		all = append(all, s)
		done += s.Events
	}
	return all
}

// LongOptions choose the parts of a long run.
type LongOptions struct {
	Parts []string      // none: all
	Dir   string        // folder for the results
	Cores int           // to use
	Limit time.Duration // start no slice that would not end by then; 0: no limit
	Table string        // file for the table; none: no table
}

// long is one long run.
type long struct {
	LongOptions
	bin     string // folder with this program and the test binaries
	results string // file
	began   time.Time

	mu     sync.Mutex
	rate   map[string]float64 // events a second, of one slice
	failed int
	err    error // of writing results
}

// RunLong runs the slices that this commit has not run yet, writes the table,
// and returns how many slices failed.
func RunLong(ctx context.Context, o LongOptions) (failed int, err error) {
	for _, name := range o.Parts {
		if !slices.Contains(PartNames(), name) {
			return 0, fmt.Errorf("no part %q; there are %s", name, strings.Join(PartNames(), ", "))
		}
	}
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	if err := os.MkdirAll(o.Dir, 0o755); err != nil {
		return 0, err
	}
	l := &long{LongOptions: o, bin: filepath.Dir(self), results: filepath.Join(o.Dir, "done.jsonl"),
		began: time.Now(), rate: map[string]float64{}}
	before, err := readDone(l.results)
	if err != nil {
		return 0, err
	}
	for i := range parts {
		if len(o.Parts) == 0 || slices.Contains(o.Parts, parts[i].name) {
			l.runPart(ctx, &parts[i], before)
		}
	}
	if o.Table != "" {
		l.err = errors.Join(l.err, writeTable(o.Table, l.results))
	}
	return l.failed, l.err
}

// runPart runs the slices of a part that this commit has not run yet, as many
// at once as there are cores for.
func (l *long) runPart(ctx context.Context, p *part, before []done) {
	ran := map[int]bool{}
	for _, d := range before {
		if d.Slice.Part == p.name && d.Commit == Commit {
			ran[d.Slice.Index] = true
			l.rate[p.name] = float64(d.Result.Events) / d.Seconds
		}
	}
	seats := make(chan struct{}, max(1, l.Cores/max(1, p.cores)))
	if p.cores == 0 {
		seats = make(chan struct{}, 1)
	}
	var wg sync.WaitGroup
	for _, s := range p.slices() {
		if ran[s.Index] {
			continue
		}
		seats <- struct{}{}
		if ctx.Err() != nil || !l.fits(p, &s) {
			break
		}
		wg.Go(func() {
			defer func() { <-seats }()
			l.runSlice(ctx, p, s)
		})
	}
	wg.Wait()
}

// fits reports whether a slice can end within the limit. A soak is made as long
// as there is time.
func (l *long) fits(p *part, s *Slice) bool {
	if l.Limit == 0 {
		return true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	room := (l.Limit - time.Since(l.began)).Seconds()
	if p.name == "soak" {
		s.Events = min(s.Events, int(room/60)-1)
		return s.Events > 0
	}
	rate := l.rate[p.name]
	return room > 0 && (rate == 0 || float64(s.Events)/rate <= room)
}

// runSlice runs a slice and appends its result to the file.
func (l *long) runSlice(ctx context.Context, p *part, s Slice) {
	s.report = filepath.Join(l.Dir, fmt.Sprintf("%s-%d.json", s.Part, s.Index))
	defer os.Remove(s.report)
	args := p.command(s)
	cmd := exec.CommandContext(ctx, filepath.Join(l.bin, args[0]), args[1:]...)
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	if p.cores == 1 {
		cmd.Env = append(os.Environ(), "GOMAXPROCS=1") // it has one goroutine; the collector's would crowd the slices beside it
	}
	// Ctrl-C reaches this process alone, which ends the slices.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 20 * time.Second
	began := time.Now()
	exit := cmd.Run()
	if ctx.Err() != nil {
		return // not a result
	}
	d := done{Slice: s, Commit: Commit, Machine: machine(), Command: strings.Join(args, " "),
		Began: began.UTC(), Seconds: time.Since(began).Seconds()}
	if err := d.read(p, log.String(), exit); err != nil {
		d.Result.Failed, d.Result.Failures = d.Result.Failed+1, append(d.Result.Failures, err.Error())
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rate[p.name] = float64(max(1, d.Result.Events)) / d.Seconds
	fmt.Printf("%v: %s, slice %d of %d: %s %s, %d checks failed, in %.0f s\n", time.Since(l.began).Round(time.Second), p.name, s.Index+1,
		(p.target+p.slice-1)/p.slice, number(d.Result.Events), p.unit, d.Result.Failed, d.Seconds)
	if d.Result.Failed > 0 {
		l.failed++
		file := filepath.Join(l.Dir, fmt.Sprintf("failed-%s-%d.log", s.Part, s.Index))
		_ = os.WriteFile(file, log.Bytes(), 0o644)
		fmt.Printf("FAILED: %s; the whole log is in %s\nagain: %s\n", strings.Join(d.Result.Failures, "; "), file, d.Command)
	}
	l.err = errors.Join(l.err, appendDone(l.results, &d))
}

// done is the result of a slice: a line of the file.
type done struct {
	Slice   Slice
	Commit  string
	Machine string
	Command string
	Began   time.Time
	Seconds float64
	Result  Result // Events are those that really took place
}

var seedsDone = regexp.MustCompile(`(\d+) (?:seeds, (\d+) requests|schedules in)`)

// read takes the result from the log of a test, or from the report of a campaign.
func (d *done) read(p *part, log string, exit error) error {
	lines := strings.Split(strings.TrimSpace(log), "\n")
	failure := fmt.Errorf("%v: %s", exit, strings.Join(lines[max(0, len(lines)-5):], " | "))
	if p.unit == "seeds" {
		m := seedsDone.FindStringSubmatch(log)
		if exit != nil || m == nil {
			return failure
		}
		d.Result.Events, _ = strconv.Atoi(m[1])
		d.Result.Answers, _ = strconv.Atoi(m[2])
		d.Result.Passed = d.Result.Events
		return nil
	}
	text, err := os.ReadFile(d.Slice.report)
	results := []Result{}
	if err == nil {
		err = json.Unmarshal(text, &results)
	}
	if err != nil || len(results) != 1 {
		return errors.Join(failure, err)
	}
	d.Result = results[0]
	if p.name == "soak" {
		d.Result.Events = int(d.Result.Seconds / 60)
	}
	if exit != nil && d.Result.Failed == 0 {
		return failure
	}
	return nil
}

// readDone reads a file of results. A missing file has none.
func readDone(file string) (all []done, err error) {
	f, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	in := bufio.NewScanner(f)
	in.Buffer(nil, 16<<20)
	for n := 1; in.Scan(); n++ {
		var d done
		if err := json.Unmarshal(in.Bytes(), &d); err != nil {
			return nil, fmt.Errorf("%s, line %d: %w", file, n, err)
		}
		all = append(all, d)
	}
	return all, in.Err()
}

// appendDone adds a line, whole or not at all.
func appendDone(file string, d *done) error {
	text, err := json.Marshal(d)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(append(text, '\n'))
	return errors.Join(err, f.Close())
}

// Commit is what this program was built from. make sets it.
var Commit = "unknown"

// machine in a few words.
func machine() string {
	cpu := "CPU"
	text, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(text)) {
		if name, ok := strings.CutPrefix(line, "model name"); ok {
			cpu = strings.TrimSpace(strings.TrimLeft(name, "\t :"))
			break
		}
	}
	return fmt.Sprintf("%d cores, %s", runtime.NumCPU(), cpu)
}
