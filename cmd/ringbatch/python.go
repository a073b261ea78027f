// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"syscall"
)

// helps are what Python says of these commands' flags, for --help without Python, man
// pages and completions. A Python test compares; the texts are made anew by
// `python3 -m ringbatch.serve.torch_cli --help >cmd/ringbatch/help/torch.txt`.
//
//go:embed help/*.txt
var helps embed.FS

// runServe serves whatever a file or a Python object holds, whose flags Python knows.
func runServe(_ context.Context, args []string) error {
	return becomePython("serve", "numpy", "ringbatch", args)
}

// runTorch serves a PyTorch model, whose flags Python knows.
func runTorch(_ context.Context, args []string) error {
	return becomePython("torch", "torch", "ringbatch[torch]", args)
}

// runOnnx serves an ONNX file with ONNX Runtime, likewise.
func runOnnx(_ context.Context, args []string) error {
	return becomePython("onnx", "onnxruntime", "ringbatch[onnx]", args)
}

// becomePython is `python3 -m ringbatch.serve.NAME_cli` in this process, if Python
// has what that needs: our package and another, which installing what is named brings.
func becomePython(name, needed, install string, args []string) error {
	if slices.Contains(args, "--help") || slices.Contains(args, "-h") {
		help, err := helps.ReadFile("help/" + name + ".txt")
		fmt.Print(string(help))
		return err
	}
	python, err := exec.LookPath(cmp.Or(os.Getenv("PYTHON"), "python3"))
	if err != nil {
		return fmt.Errorf("ringbatch %s needs Python with the packages ringbatch and %s: %w", name, needed, err)
	}
	probe := exec.Command(python, "-c", "import importlib.util as u, sys; sys.exit(sum(1 << i for i, m in enumerate(('ringbatch', '"+needed+"')) if u.find_spec(m) is None))")
	var exit *exec.ExitError
	if err := probe.Run(); errors.As(err, &exit) {
		missing := map[int]string{1: "ringbatch is", 2: needed + " is", 3: "ringbatch and " + needed + " are"}[exit.ExitCode()]
		return fmt.Errorf("%s not installed for %s: pip install '%s', or name another Python in $PYTHON", missing, python, install)
	} else if err != nil {
		return err
	}
	return syscall.Exec(python, append([]string{python, "-m", "ringbatch.serve." + name + "_cli"}, args...), os.Environ())
}
