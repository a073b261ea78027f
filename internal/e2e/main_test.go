// Package e2e proves the promises that hold between processes: the test
// binary runs itself again as broker, worker and client, and kills them.
package e2e

import (
	"os"
	"testing"

	"github.com/ringbatch/ringbatch/internal/testbed"
)

func TestMain(m *testing.M) {
	testbed.Play(testbed.Roles{
		"broker":  testbed.With(testbed.PlayBroker),
		"worker":  testbed.With(playWorker),
		"client":  testbed.With(playClient),
		"damage":  testbed.With(playDamage),
		"ballast": testbed.With(playBallast),
		"clock":   playClock,
	})
	// The Go runtime's own descriptors, before anything is counted.
	if r, w, err := os.Pipe(); err == nil {
		r.Close()
		w.Close()
	}
	os.Exit(m.Run())
}

// job is what a child process should do; most need only a part of it.
type job struct {
	Socket string
	Model  testbed.Model
	Do     string `json:",omitempty"`
	Window int    `json:",omitempty"`
	Name   string `json:",omitempty"` // of a worker
	Seed   int64  `json:",omitempty"`
}
