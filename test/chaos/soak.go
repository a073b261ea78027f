// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"context"
	"path/filepath"
	"time"

	"github.com/ringbatch/ringbatch/test/testbed"
)

const soakLease = time.Second

// sample is one line of the soak's table.
type sample struct {
	at             time.Duration
	broker, client testbed.Usage
	window
	kills int
}

// soak runs everything at once at low intensity: about one request in a
// hundred meets a death. It plots what the broker and an honest client use.
func soak(ctx context.Context, o Options) (score, []Result, error) {
	r, err := newRun(ctx, "soak", o.Seed, int(o.Soak/time.Second))
	if err != nil {
		return score{}, nil, err
	}
	var samples []sample
	r.guard(func() { r.soak(o.Soak, &samples) })
	if len(samples) > 8 {
		r.noSlope(samples)
	} else {
		r.notJudged("whether anything grows: %d samples", len(samples))
	}
	if o.Out != "" && len(samples) > 0 {
		if err := tableSoak(samples, o.Seed, filepath.Join(o.Out, "soak.md")); err != nil {
			r.fail("%v", err)
		}
	}
	if len(samples) > 0 {
		r.done = samples[len(samples)-1].kills
	}
	return r.score, []Result{r.close(o.Seed)}, nil
}

func (r *run) soak(d time.Duration, samples *[]sample) {
	job := r.brokerJob()
	job.Models[0].Lease = soakLease
	h := r.startHost(job, 0, testbed.Spec{})
	stop := h.keepWorkers(2) // a busy machine can make any worker outlive a lease
	defer stop()
	h.load(loadJob{Load: 6, Pause: 15_000})
	end := time.Now().Add(d)
	every := max(time.Second, d/240)
	kills := 0
	for next := time.Now().Add(every); time.Now().Before(end); time.Sleep(time.Duration(r.intn(800)) * time.Millisecond) {
		r.mishap(h)
		kills++
		r.progress(int(time.Since(r.born) / time.Second))
		if time.Now().Before(next) {
			continue
		}
		next = next.Add(every)
		*samples = append(*samples, sample{time.Since(r.born), r.usage(h.broker), r.usage(h.loads[0]), h.window(), kills})
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
