// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bufio"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/policy"
)

// seconds is a duration given as a number of seconds or like 10ms. In JSON it
// is a number of seconds.
type seconds time.Duration

func (s seconds) d() time.Duration { return time.Duration(s) }

func (s seconds) String() string {
	if s.d() == policy.Auto {
		return "auto"
	}
	return time.Duration(s).String()
}

func (s *seconds) Type() string { return "seconds" }

func (s *seconds) Set(text string) error {
	if v, err := strconv.ParseFloat(text, 64); err == nil {
		if math.IsNaN(v) || math.Abs(v) > 1e9 {
			return fmt.Errorf("%s seconds is out of range", text)
		}
		*s = seconds(math.Round(v * 1e9))
		return nil
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		return fmt.Errorf("want seconds as a number (0.005) or with a unit (5ms), got %q", text)
	}
	*s = seconds(d)
	return nil
}

// waitTime is the value of --wait_time: seconds, or auto.
type waitTime struct{ *seconds }

func (w waitTime) Set(text string) error {
	if text == "auto" {
		*w.seconds = seconds(policy.Auto)
		return nil
	}
	return w.seconds.Set(text)
}

func (s seconds) MarshalJSON() ([]byte, error) { return json.Marshal(time.Duration(s).Seconds()) }

func (s *seconds) UnmarshalJSON(data []byte) error {
	var v float64
	if err := json.Unmarshal(data, &v); err != nil {
		return err
	}
	*s = seconds(math.Round(v * 1e9))
	return nil
}

// interval is a range of concurrency: From, From+Step … To.
type interval struct {
	From int `json:"from"`
	To   int `json:"to"`
	Step int `json:"step"`
}

func (r interval) set() bool { return r != interval{} }

func (r *interval) String() string {
	if !r.set() {
		return ""
	}
	return fmt.Sprintf("%d:%d:%d", r.From, r.To, r.Step)
}

func (r *interval) Type() string { return "a:b:step" }

func (r *interval) Set(text string) error {
	parts := strings.Split(text, ":")
	n := []int{0, 0, 1}
	if len(parts) < 2 || len(parts) > 3 {
		return fmt.Errorf("want a:b or a:b:step, got %q", text)
	}
	for i, p := range parts {
		v, err := strconv.Atoi(p)
		if err != nil {
			return fmt.Errorf("want a:b:step in whole numbers, got %q", text)
		}
		n[i] = v
	}
	if n[0] < 1 || n[1] < n[0] || n[2] < 1 {
		return fmt.Errorf("want 1 <= a <= b and step >= 1, got %q", text)
	}
	*r = interval{n[0], n[1], n[2]}
	return nil
}

// values lists the range.
func (r interval) values() []int {
	var v []int
	for n := r.From; ; n += r.Step {
		v = append(v, n)
		if n > r.To-r.Step { // before the sum, which might overflow
			return v
		}
	}
}

// availableMemory is what this machine can still give, 0 if unknown.
func availableMemory() int64 {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0
	}
	defer f.Close()
	for sc := bufio.NewScanner(f); sc.Scan(); {
		if rest, ok := strings.CutPrefix(sc.Text(), "MemAvailable:"); ok {
			kb, _ := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(rest, "kB")), 10, 64)
			return kb << 10
		}
	}
	return 0
}
