// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/broker/supervise"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// A model whose workers follow its load. A worker answers 50 requests a second.
const (
	stepTakes = 20 * time.Millisecond
	stepGoal  = 200 * time.Millisecond
	stepLow   = 20 // requests a second
	stepHigh  = 10 * stepLow
	stepMost  = 8 // workers

	calmRun = 10 * time.Second             // at the low rate, before the step
	settle  = sleeperStart + 2*time.Second // from the step until the goal must hold again
)

func playSteppedBroker(c *testbed.Child, job sleepingJob) error {
	m := sleeper(0).Config()
	m.Policy["latency_goal"], m.Policy["max_batch_size"] = stepGoal.String(), "1"
	delete(m.Policy, "wait_time") // auto
	w := sleeperJob{Name: m.Name, Takes: stepTakes}.worker()
	w.Least, w.Most = 1, stepMost
	m.Workers = []supervise.Worker{w}
	return serveBroker(c, broker.Config{Socket: job.Socket, Models: []broker.ModelConfig{m}})
}

// stepLoad raises a load tenfold: the workers must follow, and then stay. Events are seconds
// of the high load.
func stepLoad(r *run) {
	b := r.start(testbed.Spec{Role: "stepped broker", Job: sleepingJob{Socket: r.socket()}, Procs: 2})
	r.must(b.Expect("ready", nil, enoughTime))
	a, name := admin.New(r.socket()), sleeper(0).Name
	r.must(a.WaitReady(r.ctx, name))
	c, err := client.Dial(r.ctx, name, client.WithSocket(r.socket()), client.WithWindow(48))
	r.must(err)
	defer c.Close()

	var mu sync.Mutex
	var sent sync.WaitGroup
	send := func(perSecond int, d time.Duration) (late []time.Duration) {
		began := time.Now()
		tick := time.NewTicker(time.Second / time.Duration(perSecond))
		defer tick.Stop()
		for at := time.Duration(0); at < d && r.ctx.Err() == nil; at = time.Since(began) {
			<-tick.C
			sent.Go(func() {
				ctx, cancel := context.WithTimeout(context.Background(), 2*stepGoal)
				defer cancel()
				began, at := time.Now(), time.Since(began)
				err := testbed.Ask(ctx, c, make([]int64, testbed.Width), testbed.Width)
				mu.Lock()
				defer mu.Unlock()
				if err != nil || time.Since(began) > stepGoal {
					late = append(late, at)
				}
			})
		}
		sent.Wait()
		return late
	}
	send(stepLow, calmRun)
	over := make(chan struct{})
	var ups, downs int
	go func() { // counts the changes of the number of workers
		defer close(over)
		for last, began := 0, time.Now(); time.Since(began) < time.Duration(r.events)*time.Second; time.Sleep(50 * time.Millisecond) {
			s, err := a.Stats(r.ctx)
			if err != nil || len(s.Models) != 1 {
				continue
			}
			switch now := s.Models[0].Staffing.Instances; {
			case last > 0 && now > last && time.Since(began) > settle:
				ups++
			case now < last:
				downs++
			}
			last = s.Models[0].Staffing.Instances
		}
	}()
	late := send(stepHigh, time.Duration(r.events)*time.Second)
	slices.Sort(late)
	back := time.Duration(0) // when a second without a late request begins
	for _, at := range late {
		if at < back+time.Second {
			back = at
		}
	}
	<-over
	s, err := a.Stats(r.ctx)
	r.must(err)
	minutes := 1 + r.events/60
	fmt.Printf("   %d requests a second after %d: %d late or refused, back under the goal %v after the step, %d workers; then %d more, %d fewer in %d s\n",
		stepHigh, stepLow, len(late), back.Round(10*time.Millisecond), s.Models[0].Staffing.Instances, ups, downs, r.events)
	r.quick(back <= settle, "requests were late until %v after the step, which has %v", back, settle)
	r.quick(downs <= minutes && ups <= minutes, "the number of workers changed %d times up and %d down in %d s of a steady load", ups, downs, r.events)
	r.check(b.Stop(enoughTime) == nil, "the broker: %s", b.Log())
}
