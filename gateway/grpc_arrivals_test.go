// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"maps"
	"slices"
	"testing"
	"time"
)

func TestUnfinishedMessagesAreKnownHoweverTheirBytesCome(t *testing.T) {
	message := func(announced byte, bytes ...byte) []byte { return append([]byte{0, 0, 0, 0, announced}, bytes...) }
	sent := []byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
	for _, f := range [][]byte{
		frame(4, 0, 0, make([]byte, 6)),                                               // settings
		frame(frameData, 0, 1, message(3, 1, 2, 3)),                                   // whole
		frame(frameData, 0, 3, message(3, 1, 2)),                                      // stops
		frame(frameData, 0, 5, append(message(1, 1), message(2, 1)...)),               // the second stops
		frame(frameData, 0, 7, message(2)[:3]),                                        // in its prefix
		frame(frameData, flagEndStream, 9, message(3)),                                // given up
		frame(frameData, 0, 11, message(3)), frame(frameReset, 0, 11, message(0)[:4]), // and so
		frame(frameData, flagPadded, 13, append(append([]byte{4}, message(2, 1)...), 9, 9, 9, 9)), // stops before its padding
		frame(frameData, flagPadded, 15, append(append([]byte{2}, message(2, 1, 2)...), 9, 9)),
		frame(frameData, 0, 17, message(2, 1)), frame(frameData, 0, 17, []byte{2}), // in two
		frame(8, 0, 3, make([]byte, 4)), // a larger window
	} {
		sent = append(sent, f...)
	}
	for step := 1; step <= len(sent); step++ {
		var a arrivals
		a.init(newAwake())
		for part := range slices.Chunk(sent, step) {
			a.follow(part)
		}
		if got := slices.Sorted(maps.Keys(a.unfinished)); !slices.Equal(got, []uint32{3, 5, 7, 13}) {
			t.Fatalf("%d bytes at a time: %v", step, got)
		}
		if got := a.unfinished[3].got; got != 2 {
			t.Fatalf("%d bytes at a time: %d have come", step, got)
		}
	}
}

func TestAMessageThatHasJustBegunIsNotSlowAsAnotherIs(t *testing.T) {
	p := &pace{body: time.Minute, rate: leastRate}
	unread := func() int64 { return 0 }
	var a arrivals
	a.init(newAwake())
	now := a.awake.now()
	if some, all := a.slow(now, false, p, unread); some || all {
		t.Errorf("there is none: %t, %t", some, all)
	}
	a.unfinished[1] = arrival{since: now - int64(time.Hour)}
	if some, all := a.slow(now, false, p, unread); !some || !all {
		t.Errorf("one is slow: %t, %t", some, all)
	}
	a.unfinished[3] = arrival{since: now}
	if some, all := a.slow(now, false, p, unread); !some || all {
		t.Errorf("one is slow, one has just begun: %t, %t", some, all)
	}
}
