// SPDX-License-Identifier: Apache-2.0

// Package e2e tests the promises between processes: the test binary runs itself again
// as broker, worker and client, and kills them.
package e2e

import (
	"fmt"
	"os"
	"testing"

	"github.com/ringbatch/ringbatch/test/testbed"
)

func TestMain(m *testing.M) {
	testbed.Play(testbed.Roles{
		"broker":     testbed.With(testbed.PlayBroker),
		"worker":     testbed.With(playWorker),
		"stage":      testbed.With(playStage),
		"evil stage": testbed.With(playEvilStage),
		"client":     testbed.With(playClient),
		"damage":     testbed.With(playDamage),
		"setter":     testbed.With(playSetter),
	})
	// The Go runtime's own descriptors, before anything is counted.
	if r, w, err := os.Pipe(); err == nil {
		r.Close()
		w.Close()
	}
	code := m.Run()
	if left, err := testbed.Children(); err != nil || len(left) > 0 {
		fmt.Printf("processes are left behind: %v, %v\n", left, err)
		code = 1
	}
	os.Exit(code)
}

// job describes a child process.
type job struct {
	Socket string
	Model  testbed.Model
	Do     string `json:",omitempty"`
	Window int    `json:",omitempty"`
	Name   string `json:",omitempty"` // of a worker
	AtOnce int    `json:",omitempty"` // batches that a worker runs at once
	Seed   int64  `json:",omitempty"`
	Stage  int    `json:",omitempty"` // of a pipeline that a worker serves
}
