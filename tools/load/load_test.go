// SPDX-License-Identifier: Apache-2.0

package load

import (
	"slices"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/tools/feed"
)

func TestRequestsSendTheGivenRowsInTurn(t *testing.T) {
	sig, err := tensor.ParseSignature([]string{"x:u8[2]"}, []string{"y:u8[2]"})
	must.Do(t, err)
	rows, err := feed.New(&sig, []tensor.Tensor{tensor.Of("x", []uint8{1, 1, 2, 2, 3, 3}, 3, 2)}, 1)
	must.Do(t, err)
	for perRequest, want := range map[int][][]byte{
		1: {{1, 1}, {2, 2}, {3, 3}},
		2: {{1, 1, 2, 2}, {3, 3, 1, 1}},
		4: {{1, 1, 2, 2, 3, 3, 1, 1}},
	} {
		p := &Producer{inputs: (&Load{Rows: perRequest}).inputs(rows)}
		var got [][]byte
		for range want {
			got = append(got, p.next().plain[0])
		}
		slices.SortFunc(got, slices.Compare) // the first may be any
		slices.SortFunc(want, slices.Compare)
		if !slices.EqualFunc(got, want, slices.Equal) {
			t.Errorf("%d rows a request: %v, want %v", perRequest, got, want)
		}
	}
}

func TestAnOpenLoopTakesNoMoreSlotsThanThereAre(t *testing.T) {
	for _, c := range []struct {
		load  Load
		slots int
		want  int
	}{
		{Load{Clients: 8, Rows: 1}, 4096, 1},
		{Load{Clients: 8, Rows: 1, Rate: 9}, 4096, 64},
		{Load{Clients: 8, Rows: 1, Rate: 9}, 256, 32},
		{Load{Clients: 8, Rows: 4, Rate: 9}, 256, 8},
		{Load{Clients: 8, Rows: 4, Rate: 9}, 16, 1},
		{Load{Clients: 8, Rows: 1, Rate: 9, InFlight: 100}, 256, 100}, // as asked for
	} {
		if got := c.load.inFlight(c.slots); got != c.want {
			t.Errorf("%+v, %d slots: %d in flight, want %d", c.load, c.slots, got, c.want)
		}
	}
}
