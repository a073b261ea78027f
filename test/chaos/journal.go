// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"encoding/json"
	"fmt"
	"sync"
	"time"
)

// journal keeps the broker's log by message and process.
type journal struct {
	mu   sync.Mutex
	cond *sync.Cond
	when map[entryKey]time.Time
	all  map[string]int
}

type entryKey struct {
	msg string
	pid int
}

func newJournal() *journal {
	j := &journal{when: map[entryKey]time.Time{}, all: map[string]int{}}
	j.cond = sync.NewCond(&j.mu)
	return j
}

func (j *journal) read(line []byte) {
	var e struct {
		Time time.Time
		Msg  string
		Pid  int
	}
	if json.Unmarshal(line, &e) != nil {
		fmt.Printf("   broker: %s\n", line) // a panic, most likely
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.when[entryKey{e.Msg, e.Pid}] = e.Time
	j.all[e.Msg]++
	j.cond.Broadcast()
}

// count is how often the broker has logged one of the messages.
func (j *journal) count(msgs ...string) (n int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, msg := range msgs {
		n += j.all[msg]
	}
	return n
}

// wait waits until the broker has logged msg about pid, and returns the time of the line.
func (j *journal) wait(msg string, pid int, d time.Duration) (time.Time, bool) {
	timer := time.AfterFunc(d, func() { j.mu.Lock(); j.cond.Broadcast(); j.mu.Unlock() })
	defer timer.Stop()
	end := time.Now().Add(d)
	j.mu.Lock()
	defer j.mu.Unlock()
	for {
		if t, ok := j.when[entryKey{msg, pid}]; ok {
			return t, true
		}
		if time.Now().After(end) {
			return time.Time{}, false
		}
		j.cond.Wait()
	}
}
