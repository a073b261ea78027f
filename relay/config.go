// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"cmp"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"time"

	"google.golang.org/grpc/resolver"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// Config configures a relay.
type Config struct {
	Model  string // on this host
	Remote string // the model's name on the far side; default: the same
	Target string // host:port, a comma-separated list of them, or any gRPC target: dns:///…
	Socket string // the broker's; default as everywhere
	Name   string // for logs and statistics
	Policy policy.Policy
	// Inputs and Outputs are tensors with the maxima of their variable dimensions,
	// for a far side that does not say them.
	Inputs, Outputs []tensor.Spec

	InFlight int // most batches on the network at once, 1 … 256
	Attempts int // most hosts that a batch is sent to

	TLS        bool   // with the system's authorities, or CAFile's
	CAFile     string // authorities of the far side's certificate
	CertFile   string // our own certificate, and
	KeyFile    string // its key
	ServerName string // the name in the far side's certificate, if not the target's
	TokenFile  string // every call shows the file's first token
	Insecure   bool   // show the token without TLS

	CheckInterval time.Duration // between two checks of a host
	CheckTimeout  time.Duration // of a check

	Version       string // see worker.Config; default: the model's name on the far side
	WaitForBroker time.Duration
	Logger        *slog.Logger
	Started       func(sig *tensor.Signature, maxBatch int) // called when the first host has answered
}

// Defaults.
const (
	DefaultInFlight      = 32
	DefaultAttempts      = 3
	DefaultCheckInterval = 300 * time.Millisecond
	DefaultCheckTimeout  = time.Second
)

func (c *Config) fill() {
	c.Remote = cmp.Or(c.Remote, c.Model)
	c.Version = cmp.Or(c.Version, "relay of "+c.Remote)
	c.Name = cmp.Or(c.Name, "relay")
	c.InFlight = cmp.Or(c.InFlight, DefaultInFlight)
	c.Attempts = cmp.Or(c.Attempts, DefaultAttempts)
	c.CheckInterval = cmp.Or(c.CheckInterval, DefaultCheckInterval)
	c.CheckTimeout = cmp.Or(c.CheckTimeout, DefaultCheckTimeout)
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.CAFile != "" || c.CertFile != "" || c.ServerName != "" {
		c.TLS = true
	}
}

func (c *Config) check() error {
	switch {
	case c.Model == "" || c.Target == "":
		return fmt.Errorf("%w: a relay needs a model and a target", status.ErrInvalid)
	case c.InFlight < 1 || c.InFlight > shm.MaxMailDepth:
		return fmt.Errorf("%w: %d batches in flight, must be 1..%d", status.ErrInvalid, c.InFlight, shm.MaxMailDepth)
	case c.Attempts < 1:
		return fmt.Errorf("%w: %d attempts", status.ErrInvalid, c.Attempts)
	case (c.CertFile == "") != (c.KeyFile == ""):
		return fmt.Errorf("%w: a certificate of our own needs its key, and the key its certificate", status.ErrInvalid)
	case c.CheckInterval < 0 || c.CheckTimeout < 0:
		return fmt.Errorf("%w: a check interval or timeout below zero", status.ErrInvalid)
	case c.TokenFile != "" && !c.TLS && !c.Insecure && !c.onlyThisHost():
		return fmt.Errorf("%w: the token would cross the network in plain sight: give --tls or --tls-ca, or say --insecure if something "+
			"else guards it (a mesh, a tunnel)", status.ErrInvalid)
	}
	return c.checkAddresses()
}

// onlyThisHost reports whether the target is a list of loopback addresses.
func (c *Config) onlyThisHost() bool {
	for _, address := range c.list() {
		host, _, err := net.SplitHostPort(address)
		if ip := net.ParseIP(host); err != nil || host != "localhost" && (ip == nil || !ip.IsLoopback()) {
			return false
		}
	}
	return len(c.list()) > 0
}

// list returns the target's addresses; nil if the target is another kind of gRPC's.
func (c *Config) list() []string {
	if scheme, rest := c.scheme(); strings.HasPrefix(rest, "//") || strings.HasPrefix(scheme, "unix") && resolver.Get(scheme) != nil ||
		strings.Contains(rest, ":") && resolver.Get(scheme) != nil { // dns:8001 is a host of that name, dns:host:8001 a target
		return nil
	}
	var all []string
	for _, address := range strings.Split(c.Target, ",") {
		if address = strings.TrimSpace(address); address != "" {
			all = append(all, address)
		}
	}
	return all
}

// scheme splits the target at its first colon. As in gRPC, case does not matter.
func (c *Config) scheme() (scheme, rest string) {
	scheme, rest, _ = strings.Cut(c.Target, ":")
	return strings.ToLower(scheme), rest
}

// checkAddresses refuses URLs, and addresses without a port. gRPC would keep trying
// port 443 for some of them.
func (c *Config) checkAddresses() error {
	if scheme, rest, given := strings.Cut(strings.ToLower(c.Target), "://"); given && resolver.Get(scheme) == nil { // http, grpc, …
		host, _, _ := strings.Cut(strings.TrimPrefix(rest, "/"), "/")
		return fmt.Errorf("%w: %q is no target of gRPC's, which are HOST:PORT, dns:///HOST:PORT or unix:PATH: is it %s? (with --tls if "+
			"that serves TLS)", status.ErrInvalid, c.Target, host)
	}
	addresses := c.list()
	if scheme, name := c.scheme(); scheme == "dns" && addresses == nil {
		if afterServer, given := strings.CutPrefix(name, "//"); given {
			_, name, _ = strings.Cut(afterServer, "/")
		}
		addresses = []string{name}
	}
	_, usual, _ := net.SplitHostPort(oip.DefaultGRPC)
	for _, address := range addresses {
		host, port, err := net.SplitHostPort(address)
		if err != nil {
			host, port = strings.Trim(address, "[]"), ""
			if _, err := netip.ParseAddr(host); strings.Contains(host, ":") && err != nil {
				return fmt.Errorf("%w: %q is no target of gRPC's here, which are HOST:PORT, dns:///HOST:PORT or unix:PATH",
					status.ErrInvalid, address)
			}
		}
		if _, err = net.LookupPort("tcp", port); err != nil || port == "" || port == "0" {
			return fmt.Errorf("%w: %q names no port: is it %s? (%s is a gateway's gRPC port, unless --grpc says otherwise there)",
				status.ErrInvalid, address, net.JoinHostPort(host, usual), usual)
		}
	}
	return nil
}
