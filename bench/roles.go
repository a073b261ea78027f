// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"

	"github.com/ringbatch/ringbatch/bench/rig"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// Roles of the model suite's processes, and those that all suites share.
func Roles() testbed.Roles {
	return testbed.Roles{
		"broker":       testbed.With(testbed.PlayBroker), // its models are declared by their workers
		"echo worker":  testbed.With(rig.EchoWorker),
		"model worker": testbed.With(modelWorkerRole),
		"alone":        testbed.With(aloneRole),
		"producer":     testbed.With(producerRole),
	}
}

// fleet is all processes of one benchmark.
type fleet struct{ *testbed.Bed }

func newFleet(ctx context.Context) (*fleet, error) {
	bed, err := testbed.New(ctx)
	return &fleet{bed}, err
}
