// SPDX-License-Identifier: Apache-2.0

package cpu

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

func TestEveryModelRunsAlone(t *testing.T) {
	for _, name := range Names() {
		m, err := New(name, Options{Scale: 2, Seed: 1})
		if err != nil {
			t.Fatal(name, err)
		}
		if err := m.Signature.Validate(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		m.Alone(3)()
	}
}

func TestSimulatedSleepsAndSaysSo(t *testing.T) {
	m, err := New("simulated", Options{FixedCost: 2 * time.Millisecond, ItemCost: time.Millisecond})
	must.Do(t, err)
	if !strings.Contains(m.Note, "simulated") {
		t.Errorf("note is %q", m.Note)
	}
	run := m.Alone(3)
	start := time.Now()
	run()
	if d := time.Since(start); d < 5*time.Millisecond {
		t.Errorf("3 rows took %v, should sleep 5ms", d)
	}
	if _, err := New("simulated", Options{FixedCost: -1}); !errors.Is(err, status.ErrInvalid) {
		t.Errorf("negative cost: %v", err)
	}
}

func TestAnUnknownModelIsNamed(t *testing.T) {
	if _, err := New("resnet", Options{}); !errors.Is(err, status.ErrInvalid) || !strings.Contains(err.Error(), "echo") {
		t.Errorf("got %v", err)
	}
}

func TestAffineRefusesNumbersThatItsTypeCannotHold(t *testing.T) {
	for _, c := range []struct {
		dtype         tensor.DType
		scale, offset float64
		want          error
	}{
		{tensor.F32, 0.5, 1e-3, nil},
		{tensor.I32, 3, -1 << 31, nil},
		{tensor.I64, 1 << 40, 7, nil},
		{tensor.I64, 0.5, 0, status.ErrInvalid},
		{tensor.I64, 1, 1 << 63, status.ErrInvalid},
		{tensor.I32, 1, 0.1, status.ErrInvalid},
		{tensor.I32, 1 << 31, 0, status.ErrInvalid},
		{tensor.I32, math.NaN(), 0, status.ErrInvalid},
		{tensor.U8, 1, 0, status.ErrDType},
	} {
		o := Options{Inputs: []tensor.Spec{{Name: "x", DType: c.dtype, Shape: []int{1}}}, Scale: c.scale, Offset: c.offset}
		if _, err := New("affine", o); !errors.Is(err, c.want) {
			t.Errorf("%v: %v", o, err)
		}
	}
}
