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

// runTorch serves a TorchScript file: it becomes `python3 -m ringbatch._torch_cli`,
// whose flags it takes.
func runTorch(_ context.Context, args []string) error {
	python, err := exec.LookPath(cmp.Or(os.Getenv("PYTHON"), "python3"))
	if err != nil {
		return fmt.Errorf("ringbatch torch needs Python with the packages ringbatch and torch: %w", err)
	}
	needs := "('ringbatch', 'torch')"
	if slices.Contains(args, "--help") || slices.Contains(args, "-h") {
		needs = "('ringbatch',)" // which knows the flags
	}
	probe := exec.Command(python, "-c", "import importlib.util as u, sys; sys.exit(sum(1 << i for i, m in enumerate("+needs+") if u.find_spec(m) is None))")
	var exit *exec.ExitError
	if err := probe.Run(); errors.As(err, &exit) {
		missing := map[int]string{1: "ringbatch is", 2: "torch is", 3: "ringbatch and torch are"}[exit.ExitCode()]
		return fmt.Errorf("%s not installed for %s: pip install 'ringbatch[torch]', or name another Python in $PYTHON", missing, python)
	} else if err != nil {
		return err
	}
	return syscall.Exec(python, append([]string{python, "-m", "ringbatch._torch_cli"}, args...), os.Environ())
}
