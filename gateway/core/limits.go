// SPDX-License-Identifier: Apache-2.0

package core

import "time"

// Everything that a caller can make the gateway hold is bounded here. What an
// operator may want to change is a field of Config; these are its defaults.
const (
	// DefaultMaxMessageBytes bounds an HTTP body or a gRPC message, with the
	// tensors in it.
	DefaultMaxMessageBytes = 256 << 20
	// DefaultMaxBufferedBytes bounds what all the callers together have in
	// the gateway's own memory: JSON bodies, gRPC messages on their way into
	// slots, answers that were joined. Binary HTTP bodies are not in it, they
	// go straight into slots.
	DefaultMaxBufferedBytes = 1 << 30
	// DefaultMaxConnections is per listener.
	DefaultMaxConnections = 4096
	// DefaultCallerRequests is how many requests one caller may have in flight.
	DefaultCallerRequests = 1024
	// DefaultClaimWait is how long a request without a deadline waits for
	// room in the ring, or for a broker that is being restarted.
	DefaultClaimWait = 5 * time.Second
	// DefaultDrainTime is how long accepted requests may take to finish.
	DefaultDrainTime = 30 * time.Second
)

const (
	MaxURLHeaderBytes = 64 << 10 // request line and headers, HTTP and HTTP/2
	MaxSmallBody      = 1 << 20  // of anything but an inference request
	maxRegions        = 1024     // shared-memory regions registered at once
	maxRegionName     = 256      // bytes
	MaxNameBytes      = 256      // of a model or version that is looked up
	MaxIDBytes        = 4 << 10  // of a request's id, which is echoed
	maxRows           = 1 << 20  // of one request, before it is split
	MaxTextBytes      = 1 << 10  // of an error's text

	// A request's own bytes up to here are not counted in the budget: they
	// live in buffers that each connection has anyway.
	SmallBuffer = 64 << 10

	StreamsPerConnection = 256     // gRPC and HTTP/2
	StreamWindow         = 1 << 20 // bytes that a peer may send ahead, per stream
	ConnectionWindow     = 4 << 20 // and per connection

	idleTimeout      = 2 * time.Minute        // between requests of an HTTP connection
	GRPCIdleTimeout  = 10 * time.Minute       // of a gRPC connection without calls
	KeepaliveTime    = 30 * time.Second       // silence after which a gRPC peer is pinged
	KeepaliveTimeout = 10 * time.Second       // and in which it has to answer
	budgetPatience   = 10 * time.Second       // a gRPC connection may stand still while its caller's buffers are full
	earlyAnswer      = 5 * time.Millisecond   // before its deadline a gRPC call is told that it has passed,
	earlyShare       = 10                     // or a tenth of its time if that is less
	AnswerPatience   = 30 * time.Second       // a caller may take to read its answer, beyond what its rate gives it
	BodyPatience     = 10 * time.Second       // headers, a handshake, or a body may take, beyond what its rate gives it
	LeastRate        = 1 << 20                // bytes a second
	stallPatience    = 2 * time.Second        // a drain waits for requests that are not whole
	idleCheck        = 50 * time.Millisecond  // how often a drain looks whether something is in flight
	reloadInterval   = time.Second            // how often certificates and tokens are looked at
	modelsInterval   = 5 * time.Second        // the broker is asked for its models that often, and when they change
	brokerPatience   = 2 * time.Second        // the broker may take to answer, twice
	workersPatience  = 15 * time.Second       // workers may take to attach again after a restart of the broker
	noBrokerInterval = 250 * time.Millisecond // while there is none
	LookupInterval   = 100 * time.Millisecond // at most that often because of an unknown model
)
