// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/internal/testbed"
)

// Roles are what a process of the benchmark can be.
func Roles() testbed.Roles {
	return testbed.Roles{
		"broker":        testbed.With(testbed.PlayBroker), // its models are declared by their workers
		"echo worker":   testbed.With(echoWorkerRole),
		"transport":     testbed.With(transportRole),
		"flood":         testbed.With(floodRole),
		"idle models":   testbed.With(idleModelsRole),
		"futex ping":    futexPingRole,
		"futex pong":    futexPongRole,
		"socket server": testbed.With(socketServerRole),
		"socket client": testbed.With(socketClientRole),
		"model worker":  testbed.With(modelWorkerRole),
		"alone":         testbed.With(aloneRole),
		"producer":      testbed.With(producerRole),

		"supervised broker": testbed.With(supervisedBrokerRole),
		"steady producer":   testbed.With(steadyProducerRole),
	}
}

// fleet is all processes of one benchmark.
type fleet struct{ *testbed.Bed }

func newFleet(ctx context.Context) (*fleet, error) {
	bed, err := testbed.New(ctx)
	return &fleet{bed}, err
}

// startBroker starts one on a socket of the fleet's folder.
func (f *fleet) startBroker(name string) (*testbed.Process, string, error) {
	socket := f.Path(name)
	p, err := f.StartReady(testbed.Spec{Role: "broker", Job: testbed.BrokerJob{Socket: socket, Limits: broker.Limits{MaxUserModels: 2 * loopsIdle}}})
	return p, socket, err
}
