// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
)

// helps are the help texts of commands in Python, for --help without Python. A Python test compares them with the commands. To update one:
// `python3 -m ringbatch.serve.torch_cli --help >cmd/ringbatch/help/torch.txt`.
//
//go:embed help/*.txt
var helps embed.FS

// runServe serves a file or a Python object. Python knows the flags.
func runServe(_ context.Context, args []string) error {
	return becomePython("serve", "numpy", "./python", args)
}

// runTorch serves a PyTorch model. Python knows the flags.
func runTorch(_ context.Context, args []string) error {
	return becomePython("torch", "torch", "'./python[torch]'", args)
}

// runOnnx serves an ONNX file with ONNX Runtime. Python knows the flags.
func runOnnx(_ context.Context, args []string) error {
	return becomePython("onnx", "onnxruntime", "'./python[onnx]'", args)
}

// becomePython replaces this process by `python3 -m ringbatch.serve.NAME_cli`, if Python
// has the packages ringbatch and needed. install is pip's argument in a clone.
func becomePython(name, needed, install string, args []string) error {
	if slices.Contains(args, "--help") || slices.Contains(args, "-h") {
		help, err := helps.ReadFile("help/" + name + ".txt")
		if err == nil {
			_, err = fmt.Print(string(help))
		}
		return err
	}
	if err := checkTarget(name, args); err != nil {
		return err
	}
	python, err := exec.LookPath(cmp.Or(os.Getenv("PYTHON"), "python3"))
	if err != nil {
		return fmt.Errorf("ringbatch %s needs Python with the packages ringbatch and %s: %w", name, needed, err)
	}
	const find = `import importlib.util as u, sys; sys.exit(sum(1 << i for i, m in enumerate(sys.argv[1:]) if u.find_spec(m) is None))`
	var exit *exec.ExitError
	if err := exec.Command(python, "-c", find, "ringbatch", needed).Run(); errors.As(err, &exit) {
		missing := map[int]string{1: "ringbatch is", 2: needed + " is", 3: "ringbatch and " + needed + " are"}[exit.ExitCode()]
		return fmt.Errorf("%s not installed for %s: pip install %s in a clone of ringbatch, or name another Python in $PYTHON", missing,
			python, install)
	} else if err != nil {
		return err
	}
	return syscall.Exec(python, append([]string{python, "-m", "ringbatch.serve." + name + "_cli"}, args...), os.Environ())
}

// checkTarget refuses a missing target, file or port before Python is looked for.
func checkTarget(name string, args []string) error {
	target, values, kind := "", 0, name != "serve"
	open := "" // a flag whose value may be the next argument
	for _, arg := range args {
		flag, value, given := strings.Cut(arg, "=")
		switch {
		case strings.HasPrefix(arg, "-"):
			kind = kind || flag == "--kind"
			if open = flag; given {
				open = ""
			}
		case open != "":
			flag, value, open = open, arg, ""
			values++
		case target == "":
			target = arg
		}
		if (flag == "--http" || flag == "--grpc") && value != "" {
			if err := checkPort(value, flag[2:]); err != nil {
				return err
			}
		}
	}
	ends := suffixes()
	about, missing := os.Stat(target)
	kind = kind || missing == nil && about.IsDir() // of Hugging Face
	switch {
	case target == "" && values == 0:
		return fmt.Errorf("%w: %s needs a TARGET\nUsage: ringbatch %s [flags] TARGET", errUsage, name, name)
	case target == "" || missing == nil && kind || missing != nil && strings.Contains(target, ":"): // Python looks closer
	case !kind && !slices.Contains(ends, strings.ToLower(filepath.Ext(target))):
		return fmt.Errorf("%s: want a file that ends in %s, a Hugging Face folder, or package.module:name", target, strings.Join(ends, ", "))
	case missing != nil:
		return fmt.Errorf("%s: there is no such file", target)
	}
	return nil
}

// suffixes are the file name suffixes that ringbatch serve supports, from its help.
func suffixes() []string {
	help, _ := helps.ReadFile("help/serve.txt")
	list, _, _ := strings.Cut(string(help), "a Hugging Face folder")
	return regexp.MustCompile(`\.[a-z0-9]+\b`).FindAllString(list, -1)
}

// checkPort refuses a port or address that another process uses.
func checkPort(at, flag string) error {
	if at == "off" {
		return nil
	}
	if !strings.Contains(at, ":") {
		at = "127.0.0.1:" + at
	}
	l, err := net.Listen("tcp", at)
	if errors.Is(err, syscall.EADDRINUSE) {
		_, port, _ := net.SplitHostPort(at)
		return portTaken(port, flag)
	} else if err == nil {
		_ = l.Close()
	}
	return nil // the gateway reports other errors
}
