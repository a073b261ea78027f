// SPDX-License-Identifier: Apache-2.0

package configfile

import (
	"errors"
	"testing"

	"github.com/ringbatch/ringbatch/status"
)

func FuzzParse(f *testing.F) {
	for _, text := range []string{
		"",
		"socket = \"/run/ringbatch/broker.sock\"\nallow_uids = [1000]\nopen_folder = true\ndrain_time = \"5s\"\nmax_clients = 9\n",
		"[[model]]\nname = \"m\"\ninputs = [\"x:f32[3,224,224]\"]\noutputs = [\"y:f32[1000]\"]\nmax_batch_size = 32\nwait_time = \"5ms\"\n",
		"[[model]]\nname = \"m\"\ninputs = [\"x:i32[<=512]\"]\noutputs = [\"y:f32[2]\"]\nslots = 99999999999\nlease = \"-1s\"\n",
		plainModel + "[[model.worker]]\ncommand = [\"w\"]\ninstances = 3\ngpus = [0]\n",
		"[[model]]\nname = 7\n",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		cfg, err := Parse(text)
		if err != nil {
			return
		}
		// An accepted model can be served, or has a named error.
		for i := range cfg.Models {
			var s status.Code
			if err := cfg.Models[i].Check(); err != nil && !errors.As(err, &s) {
				t.Fatalf("unnamed error: %v", err)
			}
		}
	})
}
