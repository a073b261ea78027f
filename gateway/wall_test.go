// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// The broker never opens a network port, and a producer links no web server.
func TestRingsDoNotImportWhatTheGatewayNeeds(t *testing.T) {
	for _, p := range []string{"client", "worker", "shm", "broker", "admin", "tensor", "status"} {
		out, err := exec.Command("go", "list", "-deps", "../"+p).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		deps := strings.Fields(string(out))
		if !slices.Contains(deps, "github.com/ringbatch/ringbatch/"+p) {
			t.Fatalf("go list says nothing of %s", p)
		}
		for _, d := range deps {
			for _, wall := range []string{"google.golang.org/", "github.com/prometheus/", "net/http"} {
				if strings.HasPrefix(d, wall) {
					t.Errorf("%s imports %s", p, d)
				}
			}
		}
	}
}
