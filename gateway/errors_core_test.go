// SPDX-License-Identifier: Apache-2.0

package gateway

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
		if m.http < 400 || m.http > 599 || m.grpc == codes.OK || m.grpc == codes.Unknown {
			t.Errorf("%s: %d, %s", code.Name(), m.http, m.grpc)
		}
		if got := meaningOf(fmt.Errorf("doing: %w", code)); got != m {
			t.Errorf("%s wrapped is %v", code.Name(), got)
		}
		// Load tools and proxies retry these by themselves.
		retried := m.http == 429 || m.http == 503
		if retried && !code.Retryable() && m.grpc != codes.Unavailable && m.grpc != codes.ResourceExhausted {
			t.Errorf("%s may be retried over HTTP only", code.Name())
		}
	}
	for err, want := range map[error]int{context.DeadlineExceeded: 504, context.Canceled: 499, errors.New("whatever"): 500} {
		if m := meaningOf(err); m.http != want {
			t.Errorf("%v: %d", err, m.http)
		}
	}
}
