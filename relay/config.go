// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// Config is what a relay does.
type Config struct {
	Model  string // on this host
	Remote string // its name on the far side; default: the same
	Target string // host:port, several of them with commas between, or any gRPC target: dns:///…
	Socket string // the broker's; default as everywhere
	Name   string // for logs and statistics
	Policy policy.Policy
	// Inputs and Outputs say how large variable dimensions may be, where the
	// far side does not: tensors of the signature with their maxima.
	Inputs, Outputs []tensor.Spec

	InFlight int // most batches on the network at once, 1 … 64
	Attempts int // hosts that one batch is sent to at most

	TLS        bool   // with the system's authorities, or those of CAFile
	CAFile     string // authorities of the far side's certificate
	CertFile   string // our own certificate, and
	KeyFile    string // its key
	ServerName string // what the far side's certificate is for, if not the target
	TokenFile  string // the first token in it is shown with every call
	Insecure   bool   // show the token without TLS

	CheckInterval time.Duration // how often a host is asked whether it is well
	CheckTimeout  time.Duration // and how long it may take to answer

	WaitForBroker time.Duration
	Logger        *slog.Logger
	Started       func(sig *tensor.Signature, maxBatch int) // the far side has told what it serves
	Memory        shm.Memory                                // for tests
}

// Defaults.
const (
	DefaultInFlight      = 32
	DefaultAttempts      = 3
	DefaultCheckInterval = 300 * time.Millisecond
	DefaultCheckTimeout  = time.Second
)

func (c *Config) fill() {
	if c.Remote == "" {
		c.Remote = c.Model
	}
	if c.Name == "" {
		c.Name = "relay"
	}
	if c.InFlight == 0 {
		c.InFlight = DefaultInFlight
	}
	if c.Attempts == 0 {
		c.Attempts = DefaultAttempts
	}
	if c.CheckInterval == 0 {
		c.CheckInterval = DefaultCheckInterval
	}
	if c.CheckTimeout == 0 {
		c.CheckTimeout = DefaultCheckTimeout
	}
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
		return fmt.Errorf("%w: the token would cross the network in plain sight: give --tls or --tls_ca, or say --insecure if something "+
			"else guards it (a mesh, a tunnel)", status.ErrInvalid)
	}
	return c.checkAddresses()
}
