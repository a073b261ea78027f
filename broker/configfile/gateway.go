// SPDX-License-Identifier: Apache-2.0

package configfile

import (
	"fmt"
	"maps"
	"os"
	"slices"

	"github.com/ringbatch/ringbatch/broker/supervise"
	"github.com/ringbatch/ringbatch/status"
)

// Gateway is the name of the process that [gateway] asks for.
const Gateway = "gateway"

// gatewayFlags are what [gateway] says: flags of the command ringbatch gateway,
// which knows them better than this package does.
type gatewayFlags map[string]any

// process is the gateway as a process to supervise.
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
				w.Command = append(w.Command, fmt.Sprintf("--%s=%v", key, v))
			default:
				return w, fmt.Errorf("%w: %s = %v", status.ErrInvalid, key, v)
			}
		}
	}
	return w, w.Fill()
}
