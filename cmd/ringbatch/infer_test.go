// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/internal/npy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

func TestNegativeNumbersAreNoFlags(t *testing.T) {
	for _, c := range []struct{ args, rest string }{
		{"m -1 2 -3.5 -.5 -1e999 -Inf", "m -1 2 -3.5 -.5 -1e999 -Inf"},
		{"--json m -1 --level -2 3", "m -1 3"},
		{"m --level=-2 -1 -- -4 --json", "m -1 -4 --json"},
		{"-7 m", "-7 m"},
	} {
		f := pflag.NewFlagSet("infer", pflag.ContinueOnError)
		f.Bool("json", false, "")
		level := f.Int("level", -2, "")
		if err := f.Parse(numbersLast(f, strings.Fields(c.args))); err != nil {
			t.Errorf("%s: %v", c.args, err)
		}
		if got := strings.Join(f.Args(), " "); got != c.rest || *level != -2 {
			t.Errorf("%s: arguments %q, level %d", c.args, got, *level)
		}
	}
	f := pflag.NewFlagSet("infer", pflag.ContinueOnError)
	if err := f.Parse(numbersLast(f, []string{"m", "-x"})); err == nil {
		t.Error("-x passed for a number")
	}
	f.Int("level", 0, "")
	if err := f.Parse(numbersLast(f, []string{"m", "1", "--level"})); err == nil || !strings.Contains(err.Error(), "needs an argument") {
		t.Errorf("a flag without its value: %v", err)
	}
}

func TestNumbersThatAreNoneTravelInJSON(t *testing.T) {
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	if text := jsonList(tensor.Of("y", []float32{nan, inf, -inf, 0.1}, 1, 4)); string(text) != `["NaN","Infinity","-Infinity",0.1]` {
		t.Errorf("%s", text)
	}
}

func TestTheShapeOfTypedNumbersIsChecked(t *testing.T) {
	sig, err := tensor.ParseSignature([]string{"x:i32[<=4,3]"}, []string{"y:i32[1]"})
	must.Do(t, err)
	for _, c := range []struct {
		shape []int
		want  error
		says  string
	}{
		{nil, status.ErrSize, "--shape"},
		{[]int{2, 3}, nil, ""},
		{[]int{1, 3}, nil, ""}, // two rows
		{[]int{4, 3}, status.ErrSize, ""},
		{[]int{5, 3}, status.ErrShape, ""},
		{[]int{0, 3}, status.ErrSize, "0 values, got 6"},
		{[]int{2}, status.ErrShape, ""},
		{[]int{1 << 62, 1 << 62}, status.ErrShape, ""}, // whose product is 0
	} {
		_, err := readInputs(&sig, strings.Fields("1 2 3 4 5 6"), nil, c.shape)
		if !errors.Is(err, c.want) || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("shape %v: %v", c.shape, err)
		}
	}
}

// An .npy file taken for raw bytes would be an answer to its header.
func TestAnNPYFileIsKnownByHowItBegins(t *testing.T) {
	sig, err := tensor.ParseSignature([]string{"x:i32[2]"}, []string{"y:i32[2]"})
	must.Do(t, err)
	raw := []byte{1, 0, 0, 0, 2, 0, 0, 0}
	file := func(name string, npyFile bool) string {
		f, err := os.Create(filepath.Join(t.TempDir(), name))
		must.Do(t, err)
		defer f.Close()
		if npyFile {
			err = npy.Write(f, npy.Array{DType: "i32", Shape: []int{1, 2}, Data: raw})
		} else {
			_, err = f.Write(raw)
		}
		must.Do(t, err)
		return f.Name()
	}
	for _, name := range []string{file("x.npy", true), file("x.NPY", true), file("x", true), file("x.bin", false)} {
		got, err := readInputs(&sig, nil, []string{"x=" + name}, nil)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		} else if x := got[0].(tensor.Tensor); !slices.Equal(x.Data, raw) || !slices.Equal(x.Shape, []int{1, 2}) {
			t.Errorf("%s: %v %v", name, x.Shape, x.Data)
		}
	}
	if _, err := readInputs(&sig, nil, []string{"x=" + file("y.npy", false)}, nil); !errors.Is(err, npy.ErrFormat) {
		t.Errorf("raw bytes in a .npy file: %v", err)
	}
}
