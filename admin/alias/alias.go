// SPDX-License-Identifier: Apache-2.0

// Package alias has names for models. Versions of a model are separate models
// (resnet@1, resnet@2); an alias (resnet) routes to one of them, or to several with
// a share of a gateway's requests each.
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

// MaxTargets bounds the models of an alias.
const MaxTargets = 8

// Alias is a name and its models, sorted by name.
type Alias struct {
	Name string
	To   []Target
}

// Target is a model of an alias.
type Target struct {
	Model string
	Share Share
}

// Share is a part of a gateway's requests, in hundredths of a percent. The shares of
// an alias add up to Whole. A client on the ring gets the model with the largest.
type Share int

// Whole is all requests.
const Whole Share = 10000

func (s Share) String() string { return strconv.FormatFloat(s.Percent(), 'f', -1, 64) + " %" }

// Percent returns the share in percent.
func (s Share) Percent() float64 { return float64(s) / 100 }

// Percent makes a share from percent.
func Percent(p float64) (Share, error) {
	s := math.Round(100 * p)
	if !(s >= 1 && s <= float64(Whole)) || math.Abs(100*p-s) > 1e-6 {
		return 0, fmt.Errorf("%w: a share of %v %%, must be above 0 and at most 100, in steps of 0.01", status.ErrInvalid, p)
	}
	return Share(s), nil
}

// Parse reads the targets of an alias: one model, or several with their shares in
// percent (resnet@1=90 resnet@2=10).
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

// Check sorts the targets, and returns an error if the alias cannot be.
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

// String returns the targets as Parse reads them.
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

// Version returns the part of a model's name after its last @, or "".
func Version(model string) string {
	if at := strings.LastIndexByte(model, '@'); at >= 0 {
		return model[at+1:]
	}
	return ""
}

// Turn returns the target of the n-th request. The shares hold over any run of
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
