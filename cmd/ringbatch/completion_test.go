// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
)

// manualOf writes the manual of the real commands into a folder.
func manualOf(t *testing.T) string {
	t.Helper()
	t.Setenv(commandEnv, "1")
	t.Setenv("SOURCE_DATE_EPOCH", "86400")
	folder := t.TempDir()
	if out, err := exec.Command(os.Args[0], "manual", folder).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return folder
}

func fileIn(t *testing.T, folder, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(folder, name))
	must.Do(t, err)
	return string(text)
}

func TestTheManualIsWhatTheCommandsSay(t *testing.T) {
	folder := manualOf(t)
	t.Run("every command and flag is in its man page and is completed", func(t *testing.T) { everyFlagIsIn(t, folder) })
	t.Run("bash completes commands, flags and models", func(t *testing.T) { bashCompletes(t, folder) })
	t.Run("the other shells read their completions", func(t *testing.T) { otherShellsRead(t, folder) })
}

// complete is what may stand for the last word.
func complete(t *testing.T, words ...string) []string {
	t.Helper()
	out, err := exec.Command(os.Args[0], append([]string{"complete"}, words...)...).Output()
	must.Do(t, err)
	return strings.Fields(string(out))
}

func everyFlagIsIn(t *testing.T, folder string) {
	overview := fileIn(t, folder, "ringbatch.1")
	for _, c := range commands() {
		page := strings.ReplaceAll(fileIn(t, folder, "ringbatch-"+c.name+".1"), `\-`, "-")
		if !strings.Contains(page, c.brief) || !strings.Contains(page, "1970-01-02") {
			t.Errorf("the page of %s does not say what it is, and of when:\n%s", c.name, page)
		}
		if !strings.Contains(overview, "  "+c.name+" ") {
			t.Errorf("ringbatch.1 does not name %s", c.name)
		}
		help, err := exec.Command(os.Args[0], c.name, "--help").Output()
		if err != nil {
			t.Fatalf("%s --help: %v", c.name, err)
		}
		flags := regexp.MustCompile(`(?m)^ {6}--([\w-]+)`).FindAllStringSubmatch(string(help), -1)
		if len(flags) == 0 && !slices.Contains([]string{"completion", "version", "licenses"}, c.name) {
			t.Errorf("%s --help names no flag:\n%s", c.name, help)
		}
		completed := complete(t, c.name, "--")
		for _, found := range flags {
			if !regexp.MustCompile(`(?m)^\.B --` + found[1] + `( |$)`).MatchString(page) {
				t.Errorf("the page of %s has no --%s", c.name, found[1])
			}
			if !slices.Contains(completed, "--"+found[1]) {
				t.Errorf("%s --%s is not completed", c.name, found[1])
			}
		}
	}
}

func bashCompletes(t *testing.T, folder string) {
	cli := startCLI(t)
	cli.start("worker", "echo", "--name", "resnet")
	cli.must("ready", "resnet", "--wait", "1m")
	script, bin := filepath.Join(folder, "ringbatch.bash"), filepath.Join(t.TempDir(), "ringbatch")
	must.Do(t, os.Symlink(os.Args[0], bin))
	for line, want := range map[string]string{
		"bro":                 "broker",
		"broker --take-o":     "--take-over",
		"broker --max-batch-": "--max-batch-size --max-batch-cost",
		"stats --js":          "--json",
		"torch --mem":         "--memory", // a flag that Python knows
		"stats res":           "resnet",
		"stats --socket res":  "", // a file
		"nothing --x":         "",
	} {
		const complete = `source "$1"; COMP_WORDS=($2); COMP_CWORD=$((${#COMP_WORDS[@]}-1)); _ringbatch; echo "${COMPREPLY[@]}"`
		out, err := exec.Command("bash", "-c", complete, "bash", script, bin+" "+line).CombinedOutput()
		if err != nil || strings.TrimSpace(string(out)) != want {
			t.Errorf("%q is completed to %q (%v), want %q", line, out, err, want)
		}
	}
}

func otherShellsRead(t *testing.T, folder string) {
	for _, shell := range []string{"zsh", "fish"} {
		if _, err := exec.LookPath(shell); err != nil {
			t.Logf("%s is not installed", shell)
			continue
		}
		if out, err := exec.Command(shell, "-n", filepath.Join(folder, "ringbatch."+shell)).CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", shell, err, out)
		}
	}
}

func TestAnUnknownShellIsRefusedWithTheKnownOnes(t *testing.T) {
	t.Setenv(commandEnv, "1")
	out, err := exec.Command(os.Args[0], "completion", "tcsh").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "bash, fish, zsh") {
		t.Errorf("%v: %s", err, out)
	}
}
