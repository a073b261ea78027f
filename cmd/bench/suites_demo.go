// SPDX-License-Identifier: Apache-2.0

//go:build demo

package main

import (
	"context"
	"io"

	"github.com/ringbatch/ringbatch/bench"
)

// suites is empty with the tag demo: without gRPC, `make demo` builds in half the time.
var suites map[string]func(context.Context, []string, io.Writer) error

var roles = bench.Roles
