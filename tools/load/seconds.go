// SPDX-License-Identifier: Apache-2.0

package load

import (
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/ringbatch/ringbatch/policy"
)

// Seconds is a duration, given as a number of seconds or like 10ms. In JSON it is a
// number of seconds.
type Seconds time.Duration

func (s Seconds) D() time.Duration { return time.Duration(s) }

func (s Seconds) String() string {
	if s.D() == policy.Auto {
		return "auto"
	}
	return time.Duration(s).String()
}

func (s *Seconds) Type() string { return "seconds" }

func (s *Seconds) Set(text string) error {
	if v, err := strconv.ParseFloat(text, 64); err == nil {
		if math.IsNaN(v) || math.Abs(v) > 1e9 {
			return fmt.Errorf("%s seconds is out of range", text)
		}
		*s = Seconds(math.Round(v * 1e9))
		return nil
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		return fmt.Errorf("want seconds as a number (0.005) or with a unit (5ms), got %q", text)
	}
	*s = Seconds(d)
	return nil
}

func (s Seconds) MarshalJSON() ([]byte, error) { return json.Marshal(time.Duration(s).Seconds()) }

func (s *Seconds) UnmarshalJSON(data []byte) error {
	var v float64
	if err := json.Unmarshal(data, &v); err != nil {
		return err
	}
	*s = Seconds(math.Round(v * 1e9))
	return nil
}
