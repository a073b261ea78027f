// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
)

// systemd-analyze judges the units, with this command in the place that they
// name.
func TestTheUnitFilesAreWhatSystemdUnderstands(t *testing.T) {
	if !needs(t, "systemd-analyze") {
		t.Skip()
	}
	units, err := filepath.Glob("../../deploy/systemd/*.service")
	if err != nil || len(units) != 3 {
		t.Fatalf("%v, %v", units, err)
	}
	dir := t.TempDir()
	var copies []string
	for _, unit := range units {
		text, err := os.ReadFile(unit)
		must.Do(t, err)
		name := strings.Replace(filepath.Base(unit), "@", "@m", 1)
		copies = append(copies, filepath.Join(dir, name))
		if err := os.WriteFile(filepath.Join(dir, name), []byte(strings.ReplaceAll(string(text), "/usr/bin/ringbatch", os.Args[0])),
			0o600); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("systemd-analyze", append([]string{"verify", "--man=no", "--recursive-errors=no"}, copies...)...)
	out, err := cmd.CombinedOutput()
	for _, line := range strings.Split(string(out), "\n") {
		if strings.Contains(line, dir) || strings.Contains(line, "ringbatch-") {
			t.Error(line)
		}
	}
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// Root's systemd reads /etc/ringbatch, links included: the service must not write there.
func TestTheServiceMayNotWriteItsConfiguration(t *testing.T) {
	for file, unwanted := range map[string]string{
		"../../deploy/systemd/ringbatch-broker.service": "/etc/ringbatch\n",
		"../../deploy/packaging/tmpfiles.conf":          "/etc/ringbatch 0775",
		"../../deploy/packaging/scripts/postinstall.sh": "0775 /etc/ringbatch",
	} {
		text, err := os.ReadFile(file)
		if err != nil || strings.Contains(string(text), unwanted) {
			t.Errorf("%s: %v, or it has %q", file, err, unwanted)
		}
	}
}
