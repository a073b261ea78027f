// SPDX-License-Identifier: Apache-2.0

// Package alias is a name that clients attach to instead of a model's: it stands
// for one model, or for several, each with a share of the traffic. Versions of a
// model are models of their own (resnet@1, resnet@2); an alias (resnet) says
// which of them answers.
package alias

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// MaxTargets is how many models an alias may stand for.
const MaxTargets = 8

// Alias is a name and the models that it stands for, sorted by their names.
type Alias struct {
	Name string
	To   []Target
}

// Target is one of them.
type Target struct {
	Model string
	Share Share
}

// Share is a part of the traffic, in hundredths of a percent. Those of an alias
// add up to Whole.
type Share int

// Whole is all of the traffic.
const Whole Share = 10000

func (s Share) String() string { return strconv.FormatFloat(s.Percent(), 'f', -1, 64) + " %" }

// Percent is the share as people write it.
func (s Share) Percent() float64 { return float64(s) / 100 }

// Percent makes a share of a number of percent.
func Percent(p float64) (Share, error) {
	s := math.Round(100 * p)
	if !(s >= 1 && s <= float64(Whole)) || math.Abs(100*p-s) > 1e-6 {
		return 0, fmt.Errorf("%w: a share of %v %%, must be above 0 and at most 100, in steps of 0.01", status.ErrInvalid, p)
	}
	return Share(s), nil
}

// Parse reads what an alias stands for: one model, or several with their shares
// in percent (resnet@1=90 resnet@2=10).
func Parse(name string, targets ...string) (Alias, error) {
	a := Alias{Name: name}
	for _, text := range targets {
		t := Target{Model: text, Share: Whole}
		if at := strings.LastIndexByte(text, '='); at >= 0 {
			p, err := strconv.ParseFloat(strings.TrimSuffix(text[at+1:], "%"), 64)
			if err != nil {
				return a, fmt.Errorf("%w: %q: the share is no number of percent", status.ErrInvalid, text)
			}
			if t.Share, err = Percent(p); err != nil {
				return a, fmt.Errorf("%q: %w", text, err)
			}
			t.Model = text[:at]
		} else if len(targets) > 1 {
			return a, fmt.Errorf("%w: %q has no share; give each of several models one, in percent: %s=90", status.ErrInvalid, text, text)
		}
		a.To = append(a.To, t)
	}
	return a, a.Check()
}

// Check says what is wrong with an alias by itself, and sorts its targets.
func (a *Alias) Check() error {
	fail := func(format string, args ...any) error {
		return fmt.Errorf("%w: alias %q: %s", status.ErrInvalid, a.Name, fmt.Sprintf(format, args...))
	}
	if !tensor.ValidName(a.Name) {
		return fail("a name is 1..%d bytes, printable, without blanks", tensor.MaxNameBytes)
	}
	if n := len(a.To); n < 1 || n > MaxTargets {
		return fail("it stands for 1..%d models, got %d", MaxTargets, n)
	}
	slices.SortFunc(a.To, func(x, y Target) int { return cmp.Compare(x.Model, y.Model) })
	var sum Share
	for i, t := range a.To {
		switch {
		case !tensor.ValidName(t.Model):
			return fail("%q is no model's name: 1..%d bytes, printable, without blanks", t.Model, tensor.MaxNameBytes)
		case t.Model == a.Name:
			return fail("it cannot stand for itself")
		case i > 0 && t.Model == a.To[i-1].Model:
			return fail("model %q is named twice", t.Model)
		case t.Share < 1 || t.Share > Whole:
			return fail("%s has a share of %v, must be above 0 and at most 100 %%", t.Model, t.Share)
		}
		sum += t.Share
	}
	if sum != Whole {
		return fail("the shares add up to %v, not to 100 %%", sum)
	}
	return nil
}

// String is what Parse reads.
func (a *Alias) String() string {
	if len(a.To) == 1 {
		return a.To[0].Model
	}
	texts := make([]string, len(a.To))
	for i, t := range a.To {
		texts[i] = fmt.Sprintf("%s=%v", t.Model, t.Share.Percent())
	}
	return strings.Join(texts, " ")
}

// Version is the version in a model's name: what follows its last @; "" if it
// has none.
func Version(model string) string {
	if at := strings.LastIndexByte(model, '@'); at >= 0 {
		return model[at+1:]
	}
	return ""
}

// Turn is which target gets the n-th request: shares are kept over any run of
// requests, and the requests of each target are spread evenly.
func (a *Alias) Turn(n uint64) int {
	// Multiples of the golden ratio, modulo 1, fall evenly into any interval.
	const golden = 0x9e3779b97f4a7c15
	at := Share((n * golden >> 32) * uint64(Whole) >> 32)
	for i := range a.To {
		if at -= a.To[i].Share; at < 0 {
			return i
		}
	}
	return len(a.To) - 1
}

// Seats is how many of n clients each target gets: nobody is moved between two
// others when one comes (Sainte-Laguë). Targets that fits refuses get none.
func (a *Alias) Seats(n int, fits func(*Target) bool) map[string]int {
	seats := map[string]int{}
	for range n {
		t := a.Next(func(model string) int { return seats[model] }, fits)
		if t == nil {
			break
		}
		seats[t.Model]++
	}
	return seats
}

// Next is the target that a further client goes to, by how many each has; nil
// if fits refuses all.
func (a *Alias) Next(has func(model string) int, fits func(*Target) bool) (best *Target) {
	var had int
	for i := range a.To {
		t := &a.To[i]
		if !fits(t) {
			continue
		}
		if n := has(t.Model); best == nil || int(t.Share)*(2*had+1) > int(best.Share)*(2*n+1) {
			best, had = t, n
		}
	}
	return best
}
