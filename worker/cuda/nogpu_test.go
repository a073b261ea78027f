// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/worker"
)

// With or without the tag: without a GPU every call returns one sentence.
func TestWithoutAGPUEveryEntryPointSaysSo(t *testing.T) {
	if _, err := Describe(); err == nil {
		t.Skip("there is a GPU here")
	}
	_, newErr := New("echo", Options{})
	_, listErr := Describe()
	serveErr := Serve(context.Background(), worker.Config{Model: "x"}, &Model{})
	for _, err := range []error{newErr, listErr, serveErr} {
		if !errors.Is(err, status.ErrNoGPU) || strings.Contains(err.Error(), "\n") {
			t.Errorf("want one sentence that matches ErrNoGPU, got %v", err)
		}
	}
}
