// SPDX-License-Identifier: Apache-2.0

package core

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/ringbatch/ringbatch/status"
	"google.golang.org/grpc/codes"
)

func TestEveryNamedErrorHasAMeaningOnBothProtocols(t *testing.T) {
	for _, code := range status.All() {
		m, ok := meanings[code]
		if code == status.OK {
			continue
		}
		if !ok {
			t.Errorf("%s has none", code.Name())
			continue
		}
		if m.HTTP < 400 || m.HTTP > 599 || m.GRPC == codes.OK || m.GRPC == codes.Unknown {
			t.Errorf("%s: %d, %s", code.Name(), m.HTTP, m.GRPC)
		}
		if got := MeaningOf(fmt.Errorf("doing: %w", code)); got != m {
			t.Errorf("%s wrapped is %v", code.Name(), got)
		}
		// Load tools and proxies retry these by themselves.
		retried := m.HTTP == 429 || m.HTTP == 503
		if retried && !code.Retryable() && m.GRPC != codes.Unavailable && m.GRPC != codes.ResourceExhausted {
			t.Errorf("%s may be retried over HTTP only", code.Name())
		}
	}
	for err, want := range map[error]int{context.DeadlineExceeded: 504, context.Canceled: 499, errors.New("whatever"): 500} {
		if m := MeaningOf(err); m.HTTP != want {
			t.Errorf("%v: %d", err, m.HTTP)
		}
	}
}
