// SPDX-License-Identifier: Apache-2.0

package pad

import (
	"errors"
	"math/rand"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

func product(shape []int) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}

// Copy against the plain definition: an element of dst is src's where
// src has one, else zero.
func TestCopyZeroesWhatIsNotCovered(t *testing.T) {
	rng := rand.New(rand.NewSource(1))
	for range 300 {
		rank := 1 + rng.Intn(4)
		to, from := []int{1 + rng.Intn(3)}, []int{0}
		from[0] = to[0]
		for range rank - 1 {
			d := 1 + rng.Intn(5)
			to, from = append(to, d), append(from, 1+rng.Intn(d))
		}
		dst, src := tensor.Of("x", make([]int32, product(to)), to...), tensor.Of("x", make([]int32, product(from)), from...)
		d, _ := tensor.As[int32](dst)
		s, _ := tensor.As[int32](src)
		for i := range d {
			d[i] = -1
		}
		for i := range s {
			s[i] = int32(i + 1)
		}
		must.Do(t, Copy(dst, src))
		for i := range d {
			at, inside, flat := i, true, 0
			index := make([]int, rank)
			for k := rank - 1; k >= 0; k-- {
				index[k] = at % to[k]
				at /= to[k]
			}
			for k, x := range index {
				inside = inside && x < from[k]
				flat = flat*from[k] + x
			}
			want := int32(0)
			if inside {
				want = s[flat]
			}
			if d[i] != want {
				t.Fatalf("%v into %v: element %v is %d, not %d", from, to, index, d[i], want)
			}
		}
	}
	if err := Copy(tensor.Of("x", make([]int32, 2), 1, 2), tensor.Of("x", make([]int32, 3), 1, 3)); !errors.Is(err, status.ErrShape) {
		t.Errorf("larger into smaller: %v", err)
	}
	must.Fail(t, "another type", Copy(tensor.Of("x", make([]int32, 2), 1, 2), tensor.Of("x", make([]float32, 2), 1, 2)), status.ErrDType)
}

func TestBucketRoundsUp(t *testing.T) {
	sizes := []uint32{4, 16, 64}
	for n, want := range map[uint32]uint32{1: 4, 4: 4, 5: 16, 64: 64, 65: 65} {
		if got := Bucket(sizes, n); got != want {
			t.Errorf("%d became %d", n, got)
		}
	}
	if Bucket(nil, 7) != 7 {
		t.Error("no buckets, and yet rounded")
	}
}
