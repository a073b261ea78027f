// SPDX-License-Identifier: Apache-2.0

//go:build !demo

package main

import (
	"context"
	"io"
	"maps"

	"github.com/ringbatch/ringbatch/bench"
	"github.com/ringbatch/ringbatch/bench/gateway"
	"github.com/ringbatch/ringbatch/bench/pipeline"
	"github.com/ringbatch/ringbatch/bench/relay"
	"github.com/ringbatch/ringbatch/bench/transport"
	"github.com/ringbatch/ringbatch/bench/waits"
	"github.com/ringbatch/ringbatch/test/testbed"
)

var suites = map[string]func(context.Context, []string, io.Writer) error{
	"transport": transport.Run, "gateway": gateway.Run, "relay": relay.Run, "pipeline": pipeline.Run,
	"waits": waits.Run,
}

// roles of the processes of all suites.
func roles() testbed.Roles {
	all := bench.Roles()
	for _, more := range []testbed.Roles{transport.Roles(), gateway.Roles(), relay.Roles(), pipeline.Roles()} {
		maps.Copy(all, more)
	}
	return all
}
