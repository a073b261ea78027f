// Package e2e proves the promises that hold between processes: the test
// binary runs itself again as broker, worker and client, and kills them.
package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"testing"
)

// roleEnv makes the test binary play a role; its value is a role as JSON.
const roleEnv = "RINGBATCH_E2E_ROLE"

// role is what a child process should be. Children report by lines on
// standard output.
type role struct {
	Kind   string // "broker", "worker", "client", "damage", "ballast", "clock"
	Socket string

	// Broker.
	Models      []modelSpec `json:",omitempty"`
	AllowedUIDs []int       `json:",omitempty"`
	OpenFolder  bool        `json:",omitempty"`
	DrainMS     int         `json:",omitempty"`
	MaxClients  int         `json:",omitempty"`

	// Worker.
	Name  string    `json:",omitempty"`
	Depth int       `json:",omitempty"`
	Model modelSpec // client: only its name

	// Client and damage: what to do, and with how much room.
	Do     string `json:",omitempty"`
	Window int    `json:",omitempty"`
	Seed   int64  `json:",omitempty"`

	// Group is the folder of a control group to join.
	Group string `json:",omitempty"`
	// AddressMiB bounds how much more address space the process may have.
	AddressMiB int `json:",omitempty"`
	// Descriptors bounds how many descriptors it may have in all.
	Descriptors int `json:",omitempty"`
}

type modelSpec struct {
	Name     string
	Slots    int `json:",omitempty"`
	MaxBatch int `json:",omitempty"`
	WaitMS   int `json:",omitempty"`
	LeaseMS  int `json:",omitempty"`
	Width    int `json:",omitempty"` // elements of a row; default width
}

func TestMain(m *testing.M) {
	if text := os.Getenv(roleEnv); text != "" {
		var r role
		if err := json.Unmarshal([]byte(text), &r); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(2)
		}
		os.Exit(r.play())
	}
	// The Go runtime's own descriptors, before anything is counted.
	if r, w, err := os.Pipe(); err == nil {
		r.Close()
		w.Close()
	}
	os.Exit(m.Run())
}

// say reports to the test that started this process.
func say(format string, a ...any) { fmt.Printf(format+"\n", a...) }
