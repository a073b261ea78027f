// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// The broker's process never opens a network port, and a producer does not
// link a web server: what the gateway needs stays in the gateway.
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
			for _, wall := range []string{"google.golang.org/", "github.com/prometheus/", "net/http", "github.com/ringbatch/ringbatch/gateway"} {
				if strings.HasPrefix(d, wall) {
					t.Errorf("%s imports %s", p, d)
				}
			}
		}
	}
}

// A relay is a worker: it shares the protocol with the gateway, not its doors.
func TestTheRelayImportsOnlyTheProtocolOfTheGateway(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "../relay").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, d := range strings.Fields(string(out)) {
		const gateway = "github.com/ringbatch/ringbatch/gateway"
		if strings.HasPrefix(d, gateway) && d != gateway+"/oip" {
			t.Errorf("relay imports %s", d)
		}
	}
}
