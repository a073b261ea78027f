// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
)

func TestTheCostIsInterpolatedBetweenItsPoints(t *testing.T) {
	c := mustCost(t, "32=8ms, 2=3ms,4=4ms")
	for rows, want := range map[int]time.Duration{
		1:  3 * time.Millisecond, // never less than the smallest measured
		2:  3 * time.Millisecond,
		3:  3500 * time.Microsecond,
		4:  4 * time.Millisecond,
		18: 6 * time.Millisecond,
		32: 8 * time.Millisecond,
		60: 12 * time.Millisecond, // on with the last slope
	} {
		if got := c.Of(rows); got != want {
			t.Errorf("%d rows: %v, want %v", rows, got, want)
		}
	}
	if got := mustCost(t, "2=1ms").Of(6); got != 3*time.Millisecond {
		t.Errorf("one point: %v", got)
	}
}

func TestACostFileMayHaveColumnNamesAndSeconds(t *testing.T) {
	c, _, err := ReadCosts(strings.NewReader("rows,time\n# measured\n1,3.3ms\n\n32, 0.0082\n"))
	want := Cost{{1, 3300 * time.Microsecond}, {32, 8200 * time.Microsecond}}
	if err != nil || !reflect.DeepEqual(c, want) {
		t.Errorf("%v, %v", c, err)
	}
	for _, text := range []string{"", "1", "1,2ms\nx,3ms", "1,2ms\n1,3ms", "1,-2ms", "0,1ms", "1,fast\n8,5ms", "rows,time\nrows,time"} {
		_, _, err := ReadCosts(strings.NewReader(text))
		must.Fail(t, text, err, status.ErrInvalid)
	}
}

func TestABadCostIsNamed(t *testing.T) {
	for text, want := range map[string]string{
		"":          `cost point "" is not like 32=8.2ms`,
		"1":         `cost point "1" is not like 32=8.2ms`,
		"x=1ms":     `batch size "x" is not a number of rows`,
		"1=fast":    `batch time "fast" is not a duration like 8.2ms`,
		"1=0s":      `batch time "0s" is not a duration like 8.2ms`,
		"1=1s,1=2s": `the cost has two times for 1 rows`,
	} {
		if _, err := ParseCost(text); !errors.Is(err, status.ErrInvalid) || !strings.HasSuffix(err.Error(), want) {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
}

func TestACostFileTellsHowBusyWorkersSlowEachOther(t *testing.T) {
	halfway := "rows,seconds,busy,low,high,batches\n1,0.002,1,0,0,9\n8,0.004,1,0,0,9\n1,0.004,3,0,0,9\n8,0.012,3,0,0,9\n"
	nearest := "1,2ms,1\n8,4ms,1\n32,10ms,1\n8,6ms,2\n"
	for _, c := range []struct {
		file         string
		rows, others int
		want         time.Duration
	}{
		{halfway, 1, 0, 2 * time.Millisecond}, {halfway, 8, 0, 4 * time.Millisecond},
		{halfway, 1, 1, 3 * time.Millisecond}, {halfway, 8, 1, 8 * time.Millisecond}, // not measured: halfway
		{halfway, 1, 2, 4 * time.Millisecond}, {halfway, 8, 2, 12 * time.Millisecond},
		{halfway, 8, 4, 20 * time.Millisecond}, // each further worker adds as much as the measured ones
		// Sizes that were not measured beside others are slowed like the nearest measured size.
		{nearest, 1, 1, 3 * time.Millisecond}, {nearest, 8, 1, 6 * time.Millisecond},
		{nearest, 20, 1, 10500 * time.Microsecond}, {nearest, 32, 1, 15 * time.Millisecond},
	} {
		if got := time.Duration(tookOf(t, c.file, c.rows, c.others)); got != c.want {
			t.Errorf("%d rows beside %d others: %v, want %v", c.rows, c.others, got, c.want)
		}
	}
	// A number of workers between measured ones lies between them for such sizes, too.
	const file = "1,1ms,1\n8,2ms,1\n32,4ms,1\n1,2ms,2\n8,4ms,2\n32,8ms,2\n16,16ms,4\n32,32ms,4\n"
	for _, rows := range []int{1, 8, 32} {
		if two, three, four := tookOf(t, file, rows, 1), tookOf(t, file, rows, 2), tookOf(t, file, rows, 3); three < two || three > four {
			t.Errorf("%d rows: %v at 2 busy, %v at 3, %v at 4", rows, time.Duration(two), time.Duration(three), time.Duration(four))
		}
	}
	for _, text := range []string{"1,1ms,0", "1,1ms,x", "1,1ms,2", "1,1ms,1\n1,2ms,1", "1,1ms,99999999"} {
		_, _, err := ReadCosts(strings.NewReader(text))
		must.Fail(t, text, err, status.ErrInvalid)
	}
}

func tookOf(t *testing.T, file string, rows, others int) float64 {
	alone, busy, err := ReadCosts(strings.NewReader(file))
	must.Do(t, err)
	return (&Config{Cost: alone, Busy: busy}).took(rows, others)
}
