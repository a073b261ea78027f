// SPDX-License-Identifier: Apache-2.0

package feed

import (
	"errors"
	"slices"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

func TestRowsAreThoseGivenAgainAndAgain(t *testing.T) {
	sig, err := tensor.ParseSignature([]string{"tokens:i32[<=8]", "mask:bool[2]"}, []string{"y:f32[1]"})
	must.Do(t, err)
	given := tensor.Of("tokens", []int32{1, 2, 3, 4, 5, 6}, 2, 3)
	f, err := New(&sig, []tensor.Tensor{given}, 1)
	must.Do(t, err)
	rows := f.Rows(0, 3)
	x, err := tensor.As[int32](rows[0])
	if err != nil || !slices.Equal(x, []int32{1, 2, 3, 4, 5, 6, 1, 2, 3}) || !slices.Equal(f.Dims(), []int{3}) {
		t.Errorf("%v, %v, %v", x, f.Dims(), err)
	}
	if x, err = tensor.As[int32](f.Rows(1, 2)[0]); err != nil || !slices.Equal(x, []int32{4, 5, 6, 1, 2, 3}) || f.Len() != 2 {
		t.Errorf("from the second on: %v of %d, %v", x, f.Len(), err)
	}
	for _, b := range rows[1].Data {
		if b > 1 {
			t.Errorf("a bool is %d", b)
		}
	}
	if f, err = New(&sig, nil, 1); err != nil || !slices.Equal(f.Dims(), []int{8}) {
		t.Errorf("without data: %v, %v", f, err)
	}
	if x, err = tensor.As[int32](f.Rows(0, 4)[0]); err != nil || len(x) != 32 || slices.Max(x) > 63 || slices.Min(x) < 0 {
		t.Errorf("made from the signature: %v, %v", x, err)
	}
	for name, bad := range map[string]tensor.Tensor{
		"no such input": tensor.Of("z", []int32{1}, 1, 1),
		"too long":      tensor.Of("tokens", make([]int32, 9), 1, 9),
		"another type":  tensor.Of("tokens", []float32{1}, 1, 1),
		"no rows":       tensor.Of("tokens", []int32{}, 0, 3),
	} {
		var code status.Code
		if _, err := New(&sig, []tensor.Tensor{bad}, 1); !errors.As(err, &code) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
