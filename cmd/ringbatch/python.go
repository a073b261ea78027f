// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"syscall"
)

// runServe serves whatever a file or a Python object holds, whose flags Python knows.
func runServe(_ context.Context, args []string) error {
	return becomePython("serve", "numpy", args)
}

// runTorch serves a PyTorch model, whose flags Python knows.
func runTorch(_ context.Context, args []string) error {
	return becomePython("torch", "torch", args)
}

// runOnnx serves an ONNX file with ONNX Runtime, likewise.
func runOnnx(_ context.Context, args []string) error {
	return becomePython("onnx", "onnxruntime", args)
}

// becomePython is `python3 -m ringbatch._NAME_cli` in this process, if Python
// has what that needs: our package and another.
func becomePython(name, needed string, args []string) error {
	python, err := exec.LookPath(cmp.Or(os.Getenv("PYTHON"), "python3"))
	if err != nil {
		return fmt.Errorf("ringbatch %s needs Python with the packages ringbatch and %s: %w", name, needed, err)
	}
	needs := "('ringbatch', '" + needed + "')"
	if slices.Contains(args, "--help") || slices.Contains(args, "-h") {
		needs = "('ringbatch',)" // which knows the flags
	}
	probe := exec.Command(python, "-c", "import importlib.util as u, sys; sys.exit(sum(1 << i for i, m in enumerate("+needs+") if u.find_spec(m) is None))")
	var exit *exec.ExitError
	if err := probe.Run(); errors.As(err, &exit) {
		missing := map[int]string{1: "ringbatch is", 2: needed + " is", 3: "ringbatch and " + needed + " are"}[exit.ExitCode()]
		return fmt.Errorf("%s not installed for %s: pip install 'ringbatch[%s]', or name another Python in $PYTHON", missing, python, name)
	} else if err != nil {
		return err
	}
	return syscall.Exec(python, append([]string{python, "-m", "ringbatch._" + name + "_cli"}, args...), os.Environ())
}
