// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"fmt"
	"slices"
	"strconv"

	"github.com/ringbatch/ringbatch/test/testbed"
)

// pythonMishaps raises exceptions anywhere in Python clients: from signal handlers
// inside every call, in closed event loops, in dropped coroutines and in callbacks,
// with requests in flight. All slots, connections and descriptors must come back.
func pythonMishaps(r *run) {
	if !slices.Contains(r.kinds(), "python") {
		return
	}
	h := r.startHost(r.brokerJob(), 2, testbed.Spec{})
	h.load(loadJob{Load: 2, Pause: 2000})
	for i := range r.events {
		args := []string{"loops", r.socket(), theModel.Name, strconv.Itoa(r.intn(1 << 30)), "200"}
		if i%2 == 1 {
			args = []string{"signals", r.socket(), theModel.Name, strconv.Itoa(r.intn(1 << 30)), "2"}
		}
		p := r.peer(args...)
		var result struct {
			Tries    int
			Struck   map[string]int
			Problems []string
		}
		err := p.Expect("result", &result, 2*enoughTime)
		r.check(err == nil, "%s: %v", args[0], err)
		for _, what := range result.Problems {
			r.fail("Python, %s %v: %s", args[0], result.Struck, what)
		}
		if err == nil && len(result.Problems) == 0 {
			r.check(len(result.Struck) > 0, "%s: nothing was struck in %d tries", args[0], result.Tries)
		}
		fmt.Printf("   %s: %d tries, struck %v\n", args[0], result.Tries, result.Struck)
		_ = p.Wait(enoughTime)
		r.bed.End(p)
		r.progress(i + 1)
	}
	h.endLoads()
	h.settled()
}
