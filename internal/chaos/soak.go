package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/internal/svgchart"
)

// pingAs attaches as another user and returns what was said.
func pingAs(exe, socket string, uid uint32) string {
	cmd := exec.Command(exe)
	cmd.Env = []string{roleEnv + fmt.Sprintf(`={"Kind":"ping","Socket":%q}`, socket), "HOME=/"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err.Error()
	}
	defer stdin.Close()
	said, err := cmd.CombinedOutput()
	return strings.TrimSpace(fmt.Sprintf("%s %v", said, err))
}

const soakLease = time.Second

// sample is one line of the soak's table.
type sample struct {
	at       time.Duration
	broker   vitals
	client   vitals
	p50, p99 time.Duration
	right    int
	kills    int
}

// soak runs everything at once at low intensity: about one request in a
// hundred meets a death. It plots what the broker and an honest client use.
func soak(seed uint64, d time.Duration, out string) int {
	r := newRun("soak", seed, int(d/time.Second))
	samples, err := r.soak(d)
	if err != nil {
		r.fail("soak: %v", err)
	}
	if len(samples) > 8 {
		r.noSlope(samples)
		if out != "" {
			if err := errorsOf(plotSoak(samples, seed, filepath.Join(out, "soak.svg")), tableSoak(samples, seed, filepath.Join(out, "soak.md"))); err != nil {
				r.fail("%v", err)
			}
		}
	}
	r.close()
	fmt.Printf("chaos: %d passed, %d failed in %v (seed %d)\n", r.passed, r.failed, time.Since(r.start).Round(time.Second), seed)
	return min(1, r.failed)
}

func errorsOf(list ...error) error {
	for _, err := range list {
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *run) soak(d time.Duration) (samples []sample, err error) {
	h, err := r.startHost(role{Lease: int(soakLease / time.Millisecond)}, 0)
	if err != nil {
		return nil, err
	}
	stop := h.keepWorkers(2) // a busy machine can make any worker outlive a lease
	defer stop()
	before := vitalsOf(h.broker.pid())
	if err := h.load(role{Load: 6, Pause: 15_000}); err != nil {
		return nil, err
	}
	kills := 0
	end := time.Now().Add(d)
	every := max(time.Second, d/240)
	for next := time.Now().Add(every); time.Now().Before(end); time.Sleep(time.Duration(r.intn(800)) * time.Millisecond) {
		if err := r.mishap(h); err != nil {
			return samples, err
		}
		kills++
		r.progress(int(time.Since(r.start) / time.Second))
		if time.Now().Before(next) {
			continue
		}
		next = next.Add(every)
		t := h.loads[0].tally()
		samples = append(samples, sample{time.Since(r.start), vitalsOf(h.broker.pid()), vitalsOf(h.loads[0].pid()), t.P50, t.P99, t.OK, kills})
		h.loads[0].signal(unix.SIGUSR1)
	}
	h.endLoads("WorkerDied")
	h.settled(before)
	return samples, nil
}

// mishap is one thing that goes wrong.
func (r *run) mishap(h *host) error {
	ro := role{Socket: r.socket(), Seed: r.seed(), After: r.intn(3)}
	switch k := r.intn(20); {
	case k < 11:
		ro.Kind, ro.Label = "client", clientLabels[r.intn(len(clientLabels))]
	case k < 18:
		ro.Kind, ro.Label = "worker", workerLabels[r.intn(len(workerLabels))]
	case k < 19:
		ro.Kind, ro.Events = "hostile", 1000
	default:
		ro.Kind = "worker" // is stopped past its lease
	}
	p, err := spawn(ro, func([]byte) {}, nil)
	if err != nil {
		return err
	}
	if ro.Kind == "worker" && ro.Label == "" {
		p.said("attached", 10*time.Second)
		p.signal(syscall.SIGSTOP)
		time.Sleep(soakLease + 200*time.Millisecond)
		p.end()
	}
	ok := p.wait(20 * time.Second)
	_ = p.stdin.Close()
	r.check(ok, "%s that should die at %q lives", ro.Kind, ro.Label)
	if !ok {
		p.end()
	}
	return nil
}

// noSlope compares the second quarter with the last: what grows with time
// shows there.
func (r *run) noSlope(all []sample) {
	mean := func(part []sample, f func(*sample) float64) float64 {
		sum := 0.0
		for i := range part {
			sum += f(&part[i])
		}
		return sum / float64(len(part))
	}
	q := len(all) / 4
	for _, c := range []struct {
		what  string
		slack float64
		f     func(*sample) float64
	}{
		{"broker RSS in MiB", 4, func(s *sample) float64 { return float64(s.broker.rss) / (1 << 20) }},
		{"broker descriptors", 4, func(s *sample) float64 { return float64(s.broker.fds) }},
		{"broker threads", 3, func(s *sample) float64 { return float64(s.broker.threads) }},
		{"client RSS in MiB", 4, func(s *sample) float64 { return float64(s.client.rss) / (1 << 20) }},
		{"client descriptors", 2, func(s *sample) float64 { return float64(s.client.fds) }},
	} {
		early, late := mean(all[q:2*q], c.f), mean(all[len(all)-q:], c.f)
		r.check(late <= early*1.1+c.slack, "%s rose from %.1f to %.1f", c.what, early, late)
		fmt.Printf("   %s: %.1f in the second quarter, %.1f in the last\n", c.what, early, late)
	}
}

func plotSoak(all []sample, seed uint64, path string) error {
	x := make([]float64, len(all))
	series := func(f func(*sample) float64) []float64 {
		y := make([]float64, len(all))
		for i := range all {
			x[i] = all[i].at.Minutes()
			y[i] = f(&all[i])
		}
		return y
	}
	mib := func(b int64) float64 { return float64(b) / (1 << 20) }
	last := all[len(all)-1]
	fig := svgchart.Figure{
		Title:    fmt.Sprintf("Soak: %.0f minutes, %d mishaps, %d right answers", last.at.Minutes(), last.kills, last.right),
		Subtitle: fmt.Sprintf("killed clients and workers, hung workers, a hostile peer; seed %d", seed),
		Charts: []svgchart.Chart{
			{XLabel: "minutes", YLabel: "resident memory, MiB", Lines: []svgchart.Line{
				{Name: "broker", X: x, Y: series(func(s *sample) float64 { return mib(s.broker.rss) })},
				{Name: "honest client", X: x, Y: series(func(s *sample) float64 { return mib(s.client.rss) })}}},
			{XLabel: "minutes", YLabel: "descriptors", Lines: []svgchart.Line{
				{Name: "broker", X: x, Y: series(func(s *sample) float64 { return float64(s.broker.fds) })},
				{Name: "honest client", X: x, Y: series(func(s *sample) float64 { return float64(s.client.fds) })}}},
			{XLabel: "minutes", YLabel: "latency, ms", Lines: []svgchart.Line{
				{Name: "p50", X: x, Y: series(func(s *sample) float64 { return float64(s.p50) / 1e6 })},
				{Name: "p99", X: x, Y: series(func(s *sample) float64 { return float64(s.p99) / 1e6 })}}},
		},
	}
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return fig.Render(f)
}

func tableSoak(all []sample, seed uint64, path string) error {
	var t strings.Builder
	fmt.Fprintf(&t, "| minute | right answers | mishaps | broker RSS, MiB | broker fds | broker threads | client RSS, MiB | client fds | p50, ms | p99, ms |\n|---|---|---|---|---|---|---|---|---|---|\n")
	step := max(1, len(all)/20)
	for i := 0; i < len(all); i += step {
		s := &all[i]
		fmt.Fprintf(&t, "| %.1f | %d | %d | %.1f | %d | %d | %.1f | %d | %.2f | %.2f |\n", s.at.Minutes(), s.right, s.kills,
			float64(s.broker.rss)/(1<<20), s.broker.fds, s.broker.threads, float64(s.client.rss)/(1<<20), s.client.fds, float64(s.p50)/1e6, float64(s.p99)/1e6)
	}
	return os.WriteFile(path, []byte(fmt.Sprintf("Seed %d.\n\n", seed)+t.String()), 0o644)
}
