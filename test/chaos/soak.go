// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"context"
	"fmt"
	"time"

	"github.com/ringbatch/ringbatch/test/testbed"
)

const soakLease = time.Second

// sample is the resources of the broker and of an honest client at one time.
type sample struct{ broker, client testbed.Usage }

// soak runs everything at once at low intensity: about one request in a
// hundred meets a death. It checks that neither the broker nor an honest client grows.
func soak(ctx context.Context, o Options) (score, error) {
	r, err := newRun(ctx, "soak", o.Seed, int(o.Soak/time.Second))
	if err != nil {
		return score{}, err
	}
	var samples []sample
	r.guard(func() { r.soak(o.Soak, &samples) })
	if len(samples) > 8 {
		r.noSlope(samples)
	} else {
		r.notJudged("whether anything grows: %d samples", len(samples))
	}
	r.close()
	return r.score, nil
}

func (r *run) soak(d time.Duration, samples *[]sample) {
	job := r.brokerJob()
	job.Models[0].Lease = soakLease
	h := r.startHost(job, 0, testbed.Spec{})
	stop := h.keepWorkers(2) // on a busy machine any worker can outlive a lease
	defer stop()
	h.load(loadJob{Load: 6, Pause: 15_000})
	end := time.Now().Add(d)
	every := max(time.Second, d/240)
	for next := time.Now().Add(every); time.Now().Before(end); time.Sleep(time.Duration(r.intn(800)) * time.Millisecond) {
		r.mishap(h)
		r.progress(int(time.Since(r.born) / time.Second))
		if time.Now().Before(next) {
			continue
		}
		next = next.Add(every)
		*samples = append(*samples, sample{r.usage(h.broker), r.usage(h.loads[0])})
	}
	h.endLoads("WorkerDied")
	h.settled()
}

// mishap is one thing that goes wrong.
func (r *run) mishap(h *host) {
	switch k := r.intn(20); {
	case k < 11:
		_, _, ok := r.dies("client", victimJob{Label: clientLabels[r.intn(len(clientLabels))], After: r.intn(3)})
		r.check(ok, "a client did not die as it should")
	case k < 18:
		_, _, ok := r.dies("worker", victimJob{Label: workerLabels[r.intn(len(workerLabels))], After: r.intn(3)})
		r.check(ok, "a worker did not die as it should")
	case k < 19:
		p := r.start(testbed.Spec{Role: "hostile", Job: hostileJob{Socket: r.socket(), Seed: r.seed(), Events: 1000}, Procs: 2})
		defer r.bed.End(p)
		err := p.Wait(20 * time.Second)
		r.check(err == nil, "a hostile process: %v\n%s", err, p.Log())
	default:
		r.stopped(h, soakLease+200*time.Millisecond)
	}
}

// noSlope compares the second quarter of the samples with the last.
func (r *run) noSlope(all []sample) {
	mean := func(part []sample, of func(*sample) float64) float64 {
		sum := 0.0
		for i := range part {
			sum += of(&part[i])
		}
		return sum / float64(len(part))
	}
	q := len(all) / 4
	for _, c := range []struct {
		what  string
		slack float64
		of    func(*sample) float64
	}{
		{"broker RSS in MiB", 4, func(s *sample) float64 { return float64(s.broker.RSS) / (1 << 20) }},
		{"broker descriptors", 4, func(s *sample) float64 { return float64(s.broker.FDs) }},
		{"broker threads", 3, func(s *sample) float64 { return float64(s.broker.Threads) }},
		{"client RSS in MiB", 4, func(s *sample) float64 { return float64(s.client.RSS) / (1 << 20) }},
		{"client descriptors", 2, func(s *sample) float64 { return float64(s.client.FDs) }},
	} {
		early, late := mean(all[q:2*q], c.of), mean(all[len(all)-q:], c.of)
		r.check(late <= early*1.1+c.slack, "%s rose from %.1f to %.1f", c.what, early, late)
		fmt.Printf("   %s: %.1f in the second quarter, %.1f in the last\n", c.what, early, late)
	}
}
