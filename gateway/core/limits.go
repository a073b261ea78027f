// SPDX-License-Identifier: Apache-2.0

package core

import "time"

// These limits bound everything that callers make the gateway hold. Operators
// change them by fields of Config.
const (
	DefaultMaxMessageBytes = 256 << 20 // an HTTP body, or a gRPC message
	// All callers' bytes in the gateway's memory: JSON bodies, gRPC messages, joined
	// answers. Binary HTTP bodies go straight into slots.
	DefaultMaxBufferedBytes = 1 << 30
	DefaultMaxConnections   = 4096            // per listener
	DefaultCallerRequests   = 1024            // in flight
	DefaultClaimWait        = 5 * time.Second // for slots, or for a broker that is being restarted
	DefaultSequenceIdle     = time.Minute     // as Triton's
	DefaultDrainTime        = 30 * time.Second
)

const (
	MaxURLHeaderBytes = 64 << 10 // request line and headers, HTTP and HTTP/2
	MaxSmallBody      = 1 << 20  // of requests other than inference
	maxRegions        = 1024     // shared-memory regions registered at once
	maxRegionName     = 256      // bytes
	MaxNameBytes      = 256      // of a model or version
	MaxIDBytes        = 4 << 10  // of a request's id, which is echoed
	maxRows           = 1 << 20  // of a request, before it is split
	maxSequenceID     = 128      // bytes, as Triton's
	maxSteps          = 256      // of a sequence, waiting
	maxTextBytes      = 1 << 10  // of an error's text
	suspectLanes      = 4        // of a model
	sparedFailures    = 4        // of a caller in good standing
	SmallBuffer       = 64 << 10 // bytes of a request that do not count: each connection has such buffers

	StreamsPerConnection = 256     // gRPC and HTTP/2
	StreamWindow         = 1 << 20 // bytes that a peer sends ahead, per stream
	ConnectionWindow     = 4 << 20 // and per connection

	idleTimeout      = 2 * time.Minute        // of an HTTP connection between requests
	GRPCIdleTimeout  = 10 * time.Minute       // of a gRPC connection without calls
	KeepaliveTime    = 30 * time.Second       // until a silent gRPC peer is pinged
	KeepaliveTimeout = 10 * time.Second       // for its answer
	failureTime      = time.Second            // that a failed request counts against its caller
	longestSuspicion = time.Minute            // after the last of many
	budgetPatience   = 10 * time.Second       // of a gRPC connection without progress while its caller's buffers are full
	earlyAnswer      = 5 * time.Millisecond   // from a gRPC call's answer to its deadline,
	earlyShare       = 10                     // or a tenth of its time if that is less
	AnswerPatience   = 30 * time.Second       // for a caller to read its answer, besides its bytes at leastRate
	BodyPatience     = 10 * time.Second       // for headers, a handshake, or a body, besides its bytes at leastRate
	leastRate        = 1 << 20                // bytes a second
	stallPatience    = 2 * time.Second        // of a drain, for requests that do not arrive completely
	idleCheck        = 50 * time.Millisecond  // between a drain's looks at requests in flight
	reloadInterval   = time.Second            // between looks at certificates and tokens
	modelsInterval   = 5 * time.Second        // between questions for the broker's models, besides changes
	brokerPatience   = 2 * time.Second        // for the broker's answer, twice
	workersPatience  = 15 * time.Second       // for workers to attach again after a restart of the broker
	noBrokerInterval = 250 * time.Millisecond // between questions while there is no broker
	lookupInterval   = 100 * time.Millisecond // between questions because of an unknown model
)
