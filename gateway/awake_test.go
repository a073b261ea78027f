// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"testing"
	"time"
)

func TestTimeInWhichTheGatewayStoodStillIsNotCounted(t *testing.T) {
	a, now := newAwake(), time.Now()
	begin := a.tick(now)
	counted := func() time.Duration { return time.Duration(a.tick(now) - begin) }
	for range 100 {
		now = now.Add(hangUpInterval)
		a.tick(now)
	}
	if got := counted(); got != 100*hangUpInterval {
		t.Errorf("%v after a hundred intervals of %v", got, hangUpInterval)
	}
	now = now.Add(time.Hour)
	if got := counted(); got != 101*hangUpInterval {
		t.Errorf("%v: an hour in which it did not run is counted", got)
	}
	now = now.Add(standstill)
	if got := counted(); got != 101*hangUpInterval+standstill {
		t.Errorf("%v: a tick that is a little late makes the clock stop", got)
	}
}
