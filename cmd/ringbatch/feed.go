// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/tools/feed"
	"github.com/ringbatch/ringbatch/tools/profile"
)

// feedFlags choose the inputs of requests that only load a model.
type feedFlags struct{ files *[]string }

func addFeedFlags(f *flagSet) *feedFlags {
	return &feedFlags{f.StringArray("in", nil,
		"rows of an input, `NAME=FILE.npy` (repeatable; default: made from the signature, variable dimensions at their largest)")}
}

// explain adds a likely cause to the error of a failed batch.
func (g *feedFlags) explain(err error) error {
	var failed *profile.BatchError
	if len(*g.files) > 0 || !errors.As(err, &failed) {
		return err
	}
	return fmt.Errorf("%w\nits inputs were random numbers, made from the signature: --in NAME=FILE.npy sends your own", err)
}

// check checks the flags and files before the model is there, which may take minutes.
func (g *feedFlags) check() error {
	var names []string
	for _, text := range *g.files {
		name, path, ok := strings.Cut(text, "=")
		if !ok {
			return fmt.Errorf("%w: --in %s: want NAME=FILE.npy", errUsage, text)
		}
		if slices.Contains(names, name) {
			return fmt.Errorf("%w: --in %s: there is a file for %s already", errUsage, text, name)
		}
		names = append(names, name)
		file, err := os.Open(path)
		if err != nil {
			return fmt.Errorf("--in %s: %w", text, err)
		}
		_ = file.Close()
	}
	return nil
}

func (g *feedFlags) feed(sig *tensor.Signature) (*feed.Feed, error) {
	var given []tensor.Tensor
	for _, text := range *g.files {
		name, file, _ := strings.Cut(text, "=")
		spec := &tensor.Spec{Name: name}
		for i := range sig.Inputs {
			if sig.Inputs[i].Name == name {
				spec = &sig.Inputs[i]
			}
		}
		t, err := readInput(spec, file)
		if err != nil {
			return nil, err
		}
		if t.Shape == nil {
			return nil, fmt.Errorf("%w: --in %s: not an .npy file", status.ErrInvalid, text)
		}
		given = append(given, t)
	}
	return feed.New(sig, given, 1)
}
