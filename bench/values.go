// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/ringbatch/ringbatch/policy"
)

// seconds is a duration, given as a number of seconds or like 10ms. In JSON it is a
// number of seconds.
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
