// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/tensor"
)

// kind is the notation of a type. parse also accepts spellings that format does not write.
type kind[T any] struct {
	name   string
	parse  func(text string) (T, error)
	format func(T) string
}

func number(least, most int) kind[int] {
	return kind[int]{"number", func(text string) (int, error) {
		n, err := strconv.Atoi(text)
		if err != nil || n < least || n > most {
			return 0, fmt.Errorf("must be a number, %d..%d", least, most)
		}
		return n, nil
	}, strconv.Itoa}
}

func duration(least time.Duration) kind[time.Duration] {
	return kind[time.Duration]{"duration", func(text string) (time.Duration, error) {
		d, err := ParseDuration(text)
		if err == nil && (d < least || d > MaxDuration) {
			if err = fmt.Errorf("must be at most %v", MaxDuration); d < least {
				err = fmt.Errorf("must be at least %v", least)
			}
		}
		return d, err
	}, FormatDuration}
}

// durationOrAuto is a duration, or auto: the batcher chooses.
func durationOrAuto() kind[time.Duration] {
	plain := duration(0)
	return kind[time.Duration]{"duration or auto", func(text string) (time.Duration, error) {
		if text == "auto" {
			return Auto, nil
		}
		d, err := plain.parse(text)
		if err != nil {
			err = fmt.Errorf("%w, or auto", err)
		}
		return d, err
	}, func(d time.Duration) string {
		if d == Auto {
			return "auto"
		}
		return plain.format(d)
	}}
}

// ParseDuration parses 5ms, 1m30s, or seconds as a number: 0.005.
func ParseDuration(text string) (time.Duration, error) {
	if f, err := strconv.ParseFloat(text, 64); err == nil {
		if !(f >= 0 && f <= 1e9) { // so that NaN is out of range too
			return 0, fmt.Errorf("%s seconds are out of range", text)
		}
		return time.Duration(f*float64(time.Second) + 0.5), nil
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < 0 {
		return 0, fmt.Errorf("%q is not a duration: write 5ms, 1.5s, or seconds as a number", text)
	}
	return d, nil
}

// FormatDuration writes a whole number with one unit: 5ms, 90s, 1500us.
func FormatDuration(d time.Duration) string {
	for _, unit := range []struct {
		length time.Duration
		name   string
	}{{time.Second, "s"}, {time.Millisecond, "ms"}, {time.Microsecond, "us"}} {
		if d%unit.length == 0 {
			return strconv.FormatInt(int64(d/unit.length), 10) + unit.name
		}
	}
	return strconv.FormatInt(int64(d), 10) + "ns"
}

// numbers are written 8,16,32.
func numbers[T int | uint32](least, most T, count int) kind[[]T] {
	return kind[[]T]{"list", func(text string) ([]T, error) {
		text = strings.Trim(text, "[] ")
		if text == "" {
			return nil, nil
		}
		if strings.Count(text, ",") >= count {
			return nil, fmt.Errorf("at most %d numbers", count)
		}
		var list []T
		for _, field := range strings.Split(text, ",") {
			n, err := strconv.ParseInt(strings.TrimSpace(field), 10, 64)
			if err != nil || n < int64(least) || n > int64(most) {
				return nil, fmt.Errorf("must be numbers, %d..%d, like 8,16,32", least, most)
			}
			list = append(list, T(n))
		}
		return list, nil
	}, joined[T]}
}

func joined[T int | uint32](list []T) string {
	texts := make([]string, len(list))
	for i, n := range list {
		texts[i] = strconv.FormatInt(int64(n), 10)
	}
	return strings.Join(texts, ",")
}

func boolean() kind[bool] {
	return kind[bool]{"bool", func(text string) (bool, error) {
		v, err := strconv.ParseBool(text)
		if err != nil {
			return false, errors.New("must be true or false")
		}
		return v, nil
	}, strconv.FormatBool}
}

// oneOf is a word.
func oneOf[T fmt.Stringer](values ...T) kind[T] {
	names := make([]string, len(values))
	for i, v := range values {
		names[i] = v.String()
	}
	words := strings.Join(names, " or ")
	return kind[T]{words, func(text string) (v T, err error) {
		if i := slices.Index(names, text); i >= 0 {
			return values[i], nil
		}
		return v, errors.New("must be " + words)
	}, T.String}
}

// leastBucket is the smallest automatic bucket: below it a row costs hardly less.
// LEAST_BUCKET in python/ringbatch/worker/axes.py.
const leastBucket = 16

// powersOfTwo are the automatic buckets: from leastBucket on, and the largest size.
func powersOfTwo(largest uint32) (sizes []uint32) {
	for size := uint32(leastBucket); size < largest && size > 0; size *= 2 {
		sizes = append(sizes, size)
	}
	return append(sizes, largest)
}

// readBuckets sets the buckets of a variable dimension, "INPUT.DIMENSION", or of all.
// Settings.Buckets has the order of the inputs' variable dimensions.
func readBuckets(at *place, text string) error {
	if at.sub == "" { // the word "auto", which the table has
		at.s.Buckets = nil
		for _, d := range variableDims(at.inputs) {
			at.s.Buckets = append(at.s.Buckets, powersOfTwo(d.size))
		}
		return nil
	}
	sizes, err := numbers[uint32](1, 1<<32-1, MaxBuckets).parse(text)
	if err != nil {
		return err
	}
	names := variableDims(at.inputs)
	found, err := findDim(names, at.sub)
	if err != nil {
		return err
	}
	if n := len(sizes); n > 0 && sizes[n-1] != names[found].size {
		return fmt.Errorf("the last one must be the dimension's maximum, %d", names[found].size)
	}
	for len(at.s.Buckets) < len(names) {
		at.s.Buckets = append(at.s.Buckets, nil)
	}
	for i, d := range names {
		if i == found || d.shared != "" && d.shared == names[found].shared {
			at.s.Buckets[i] = sizes
		}
	}
	return nil
}

// findDim is the index of a dimension: INPUT.DIMENSION, or its own name.
func findDim(names []variableDim, name string) (int, error) {
	i := slices.IndexFunc(names, func(d variableDim) bool { return d.name == name || d.shared == name })
	if i >= 0 && name != "" {
		return i, nil
	}
	var known []string
	for _, d := range names {
		known = append(known, d.name)
		if d.shared != "" {
			known = append(known, d.shared)
		}
	}
	return 0, fmt.Errorf("no such variable dimension of an input; there are %d: %s", len(names), strings.Join(known, ", "))
}

func readCost(at *place, text string) (err error) {
	at.s.Cost, err = findDim(variableDims(at.inputs), text)
	return err
}

func writeCost(at *place, put func(sub, text string)) {
	if names := variableDims(at.inputs); at.s.Cost > 0 && at.s.Cost < len(names) {
		put("", cmp.Or(names[at.s.Cost].shared, names[at.s.Cost].name))
	}
}

func writeBuckets(at *place, put func(sub, text string)) {
	for i, d := range variableDims(at.inputs) {
		if i < len(at.s.Buckets) && len(at.s.Buckets[i]) > 0 {
			put(d.name, joined(at.s.Buckets[i]))
		}
	}
}

type variableDim struct {
	name   string // INPUT.DIMENSION
	shared string // the name in the signature, or ""
	size   uint32 // its maximum
}

func variableDims(inputs []tensor.Spec) (list []variableDim) {
	for _, t := range inputs {
		for i, v := range t.Variable {
			list = append(list, variableDim{fmt.Sprintf("%s.%d", t.Name, v), t.DimName(i), uint32(t.Shape[v])})
		}
	}
	return list
}
