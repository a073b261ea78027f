// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch"
	"github.com/ringbatch/ringbatch/internal/manual"
)

func runCompletion(ctx context.Context, args []string) error {
	f := flags("completion", " SHELL", "Print a completion script for a shell: "+strings.Join(manual.Shells, ", ")+".",
		`  source <(ringbatch completion bash)
  ringbatch completion zsh > "${fpath[1]}/_ringbatch"
  ringbatch completion fish > ~/.config/fish/completions/ringbatch.fish
`)
	if err := parse(f, args, 1, 1); err != nil {
		return err
	}
	m, err := readManual(ctx)
	if err != nil {
		return err
	}
	script := m.Completion("ringbatch", f.Arg(0))
	if script == "" {
		return fmt.Errorf("%w: no completion for the shell %q, only for %s", errUsage, f.Arg(0), strings.Join(manual.Shells, ", "))
	}
	_, err = fmt.Print(script)
	return err
}

// runManual writes the man pages and completions into a folder, for packages.
// $SOURCE_DATE_EPOCH is their date: the same commit gives the same pages.
func runManual(ctx context.Context, args []string) error {
	f := flags("manual", " FOLDER", "Write the man pages and the shells' completions into a folder.", "")
	if err := parse(f, args, 1, 1); err != nil {
		return err
	}
	m, err := readManual(ctx)
	if err != nil {
		return err
	}
	date := time.Now()
	if epoch, err := strconv.ParseInt(os.Getenv("SOURCE_DATE_EPOCH"), 10, 64); err == nil {
		date = time.Unix(epoch, 0)
	}
	files := m.Pages("ringbatch", ringbatch.Version(), date)
	for _, shell := range manual.Shells {
		files["ringbatch."+shell] = m.Completion("ringbatch", shell)
	}
	if err := os.MkdirAll(f.Arg(0), 0o755); err != nil {
		return err
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(f.Arg(0), name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// readManual reads the --help of this program.
func readManual(ctx context.Context) (*manual.Manual, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return manual.Read("ringbatch", func(args ...string) (string, error) {
		out, err := exec.CommandContext(ctx, self, args...).Output()
		return string(out), err
	})
}
