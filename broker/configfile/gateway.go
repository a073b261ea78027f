// SPDX-License-Identifier: Apache-2.0

package configfile

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/broker/supervise"
	"github.com/ringbatch/ringbatch/status"
)

// Gateway is the name of the process of [gateway].
const Gateway = "gateway"

// gatewayFlags is the table [gateway]: flags for ringbatch gateway, which checks them.
type gatewayFlags map[string]any

// drainTime is the command's default.
const drainTime = 30 * time.Second

// duration is a flag's value. The command refuses a bad one.
func (f gatewayFlags) duration(key string, otherwise time.Duration) time.Duration {
	if text, ok := f[key].(string); ok {
		if d, err := time.ParseDuration(text); err == nil && d >= 0 {
			return d
		}
	}
	return otherwise
}

// process is the gateway's process to supervise.
func (f gatewayFlags) process() (supervise.Worker, error) {
	self, err := os.Executable()
	if err != nil {
		return supervise.Worker{}, err
	}
	w := supervise.Worker{Name: Gateway, Command: []string{self, Gateway}, Client: true}
	for _, key := range slices.Sorted(maps.Keys(f)) {
		values, ok := f[key].([]any)
		if !ok {
			values = []any{f[key]}
		}
		for _, v := range values {
			switch v.(type) {
			case string, int64, bool, float64:
				w.Command = append(w.Command, fmt.Sprintf("--%s=%v", strings.ReplaceAll(key, "_", "-"), v))
			default:
				return w, fmt.Errorf("%w: %s = %v", status.ErrInvalid, key, v)
			}
		}
	}
	w.StopTime = supervise.DefaultStopTime + f.duration("drain_delay", 0) + f.duration("drain_time", drainTime)
	return w, w.Fill()
}
