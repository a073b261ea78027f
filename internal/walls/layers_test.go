// SPDX-License-Identifier: Apache-2.0

package walls

import (
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
)

const module = "github.com/ringbatch/ringbatch"

// rooms lists the packages of the module with all packages that each is linked with, tests aside.
// Paths are relative to the module; those of others begin with a slash.
func rooms(t *testing.T) map[string][]string {
	t.Helper()
	out, err := exec.Command("go", "list", "-f", `{{.ImportPath}} {{join .Deps " "}}`, module+"/...").Output()
	must.Do(t, err)
	list := map[string][]string{}
	for line := range strings.Lines(string(out)) {
		fields := strings.Fields(line)
		of := strings.TrimPrefix(strings.TrimPrefix(fields[0], module), "/")
		list[of] = []string{}
		for _, path := range fields[1:] {
			rest, ok := strings.CutPrefix(path, module+"/")
			if !ok {
				rest = "/" + path // of another module
			}
			list[of] = append(list[of], rest)
		}
	}
	return list
}

// isIn reports whether a package is one of the folders, or inside of one.
func isIn(pkg string, folders []string) bool {
	return slices.ContainsFunc(folders, func(f string) bool { return pkg == f || strings.HasPrefix(pkg, f+"/") })
}

// rules say which folders must not import which others.
var rules = []struct {
	why      string
	from     []string
	except   []string // packages that the rule leaves out, on either side
	mustNot  []string
	mustOnly []string // instead of mustNot: all that they may import
}{
	{
		why:     "the product does not import rigs, benchmarks or tools",
		from:    []string{"shm", "client", "worker", "broker", "gateway", "relay", "admin", "policy", "status", "tensor", "internal"},
		mustNot: []string{"test", "bench", "tools", "cmd"},
	},
	{why: "the command links no rig", from: []string{"cmd/ringbatch", "tools"}, mustNot: []string{"test", "bench"}},
	{
		why: "producers know no broker and no worker", from: []string{"client"}, except: []string{"client/ringbatchtest"},
		mustNot: []string{"broker", "worker", "gateway", "relay"},
	},
	{why: "workers know no broker and no client", from: []string{"worker"}, mustNot: []string{"broker", "client", "gateway", "relay"}},
	{
		why: "a broker knows its peers by the protocol only", from: []string{"broker"},
		mustNot: []string{"client", "worker", "gateway", "relay"},
	},
	{
		why: "a broker opens no network port, and its peers link no web server", from: []string{"client", "worker", "shm", "broker", "admin",
			"tensor", "status"},
		mustNot: []string{"/net/http", "/google.golang.org", "/github.com/prometheus"},
	},
	{why: "a relay links no gateway", from: []string{"relay"}, except: []string{"gateway/oip"}, mustNot: []string{"gateway"}},
	{why: "the batcher knows no advisor", from: []string{"broker/batcher"}, mustOnly: []string{"policy", "status", "tensor", "internal/typo"}},
	{
		why: "internal holds leaves", from: []string{"internal"},
		mustOnly: []string{"internal", "shm", "policy", "status", "tensor", "admin/stats", "admin/alias"},
	},
	{why: "the words that all share import nothing above them", from: []string{"status"}, mustOnly: []string{}},
	{
		why: "the memory protocol knows no control plane", from: []string{"shm"},
		mustOnly: []string{"status", "tensor", "internal/cgroup"},
	},
}

func TestLayersHold(t *testing.T) {
	list := rooms(t)
	for _, r := range rules {
		found := 0
		for pkg, imports := range list {
			if !isIn(pkg, r.from) || isIn(pkg, r.except) {
				continue
			}
			found++
			for _, path := range imports {
				if isIn(path, r.except) || isIn(path, r.from) && r.mustOnly != nil {
					continue
				}
				if isIn(path, r.mustNot) || r.mustOnly != nil && path[0] != '/' && !isIn(path, r.mustOnly) {
					t.Errorf("%s is linked with %s: %s", pkg, path, r.why)
				}
			}
		}
		if found == 0 {
			t.Errorf("no package is in %v: %s", r.from, r.why)
		}
	}
}
