// SPDX-License-Identifier: Apache-2.0

package core

import (
	"cmp"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/status"
)

// Config is how a gateway runs. The zero value serves every model of the
// user's broker to callers on this host.
type Config struct {
	Socket string // the broker's; default as everywhere
	HTTP   string // address; "" is DefaultHTTP, "off" none
	GRPC   string // address; "" is DefaultGRPC, "off" none

	// An address other than loopback needs TLS with client certificates or tokens,
	// or Insecure.
	CertFile, KeyFile string
	ClientCAFile      string   // authorities of the callers' certificates
	TokenFile         string   // the callers' tokens
	Insecure          bool     // serve everybody who reaches the address
	Models            []string // serve these only

	SystemSharedMemory bool // callers on this host may register regions

	MaxMessageBytes   int
	MaxBufferedBytes  int
	MaxConnections    int
	CallerConnections int // of an address, at each door; default: a quarter of MaxConnections
	CallerRequests    int
	CallerBytes       int      // default: a quarter of MaxBufferedBytes
	AllowedHosts      []string // names by which HTTP callers may address the gateway, besides IP addresses and localhost
	Window            int      // slots to ask the broker for, per model; default by the size of a row

	ReportLoad bool // send a load report with every gRPC answer, not only to relays

	ClaimWait    time.Duration // of a request without a deadline, for slots
	SequenceIdle time.Duration // without a step, after which a sequence ends
	DrainDelay   time.Duration // between not ready and refusing requests
	DrainTime    time.Duration // for accepted requests to finish

	Version        string       // in the server's metadata
	AdminTokenFile string       // for Other: see gateway/console
	Other          http.Handler // paths outside the protocol; default: 404
	Logger         *slog.Logger
	Started        func(httpAddr, grpcAddr net.Addr) // called when the doors are open

	Pace     Pace            // for tests; default: limits.go
	endDelay <-chan struct{} // for tests: ends the DrainDelay
}

// Pace bounds the time that callers may take. limits.go has the defaults.
type Pace struct {
	Body, Answer, Idle time.Duration
	Budget             time.Duration // of a connection without progress while its caller's buffers are full
	Reload             time.Duration // between looks at files
	Stall              time.Duration // of a drain, for requests that do not arrive completely
	Workers            time.Duration // to attach again after a restart of the broker
	Rate               int           // bytes a second that callers have to reach

	Early      time.Duration // between a gRPC call's answer and its deadline,
	EarlyShare int           // but at most this share of its time
}

// Default addresses, and the word that closes a door.
const (
	DefaultHTTP = "127.0.0.1:8000"
	DefaultGRPC = oip.DefaultGRPC
	Off         = "off"
)

func (c *Config) fill() {
	orDefault(&c.MaxMessageBytes, DefaultMaxMessageBytes)
	orDefault(&c.MaxBufferedBytes, DefaultMaxBufferedBytes)
	orDefault(&c.MaxConnections, DefaultMaxConnections)
	orDefault(&c.CallerRequests, DefaultCallerRequests)
	orDefault(&c.CallerConnections, max(1, c.MaxConnections/4))
	orDefault(&c.CallerBytes, max(1, c.MaxBufferedBytes/4))
	orDefault(&c.HTTP, DefaultHTTP)
	orDefault(&c.GRPC, DefaultGRPC)
	orDefault(&c.ClaimWait, DefaultClaimWait)
	orDefault(&c.SequenceIdle, DefaultSequenceIdle)
	orDefault(&c.DrainTime, DefaultDrainTime)
	p := &c.Pace
	orDefault(&p.Body, BodyPatience)
	orDefault(&p.Answer, AnswerPatience)
	orDefault(&p.Idle, idleTimeout)
	orDefault(&p.Budget, budgetPatience)
	orDefault(&p.Reload, reloadInterval)
	orDefault(&p.Stall, stallPatience)
	orDefault(&p.Workers, workersPatience)
	orDefault(&p.Early, earlyAnswer)
	orDefault(&p.Rate, leastRate)
	orDefault(&p.EarlyShare, earlyShare)
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	for _, address := range []*string{&c.HTTP, &c.GRPC} {
		if _, err := strconv.ParseUint(*address, 10, 16); err == nil { // a port of this host
			*address = net.JoinHostPort("127.0.0.1", *address)
		}
	}
}

func orDefault[T comparable](value *T, other T) { *value = cmp.Or(*value, other) }

func (c *Config) check() error {
	if c.HTTP == Off && c.GRPC == Off {
		return fmt.Errorf("%w: a gateway with neither HTTP nor gRPC", status.ErrInvalid)
	}
	for _, n := range []int{c.MaxMessageBytes, c.MaxBufferedBytes, c.MaxConnections, c.CallerConnections, c.CallerRequests, c.CallerBytes} {
		if n < 0 {
			return fmt.Errorf("%w: a limit of %d", status.ErrInvalid, n)
		}
	}
	if c.SequenceIdle < 0 {
		return fmt.Errorf("%w: sequences that end after %v", status.ErrInvalid, c.SequenceIdle)
	}
	if (c.CertFile == "") != (c.KeyFile == "") {
		return fmt.Errorf("%w: TLS needs both a certificate and its key", status.ErrInvalid)
	}
	if c.ClientCAFile != "" && c.CertFile == "" {
		return fmt.Errorf("%w: client certificates need TLS: a certificate and key of the gateway's own", status.ErrInvalid)
	}
	for _, address := range []string{c.HTTP, c.GRPC} {
		if err := c.checkAddress(address); err != nil {
			return err
		}
	}
	return nil
}

// checkAddress refuses addresses outside this host, unless callers have to show who
// they are.
func (c *Config) checkAddress(address string) error {
	if address == Off || c.Insecure {
		return nil
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return fmt.Errorf("%w: address %q: %v", status.ErrInvalid, address, err)
	}
	ip := net.ParseIP(host)
	if host == "localhost" || ip != nil && ip.IsLoopback() {
		return nil
	}
	if c.CertFile != "" && (c.ClientCAFile != "" || c.TokenFile != "") {
		return nil
	}
	return fmt.Errorf("%w: %s can be reached from other hosts: give --tls-cert and --tls-key, and --client-ca or --token-file, or "+
		"say --insecure if something else guards it (a network policy, a mesh, a proxy)", status.ErrInvalid, address)
}
