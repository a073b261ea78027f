// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/broker"
)

// BrokerJob is the job of PlayBroker.
type BrokerJob struct {
	Socket      string
	AllowedUIDs []int
	OpenFolder  bool
	DrainTime   time.Duration
	WorkerGrace time.Duration
	MaxClients  int
	Grants      []broker.Grant
	Limits      broker.Limits
	Models      []Model
	Log         string // a file, instead of standard error
	Journal     bool   // log everything, as JSON; otherwise warnings
}

// PlayBroker runs a broker as `ringbatch broker` does. After SIGTERM it finishes all
// accepted requests and sends "drained".
func PlayBroker(c *Child, job BrokerJob) error {
	log := io.Writer(os.Stderr)
	if job.Log != "" {
		f, err := os.OpenFile(job.Log, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
		if err != nil {
			return err
		}
		log = f
	}
	handler := slog.Handler(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelWarn}))
	if job.Journal {
		handler = slog.NewJSONHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug})
	}
	cfg := broker.Config{Socket: job.Socket, AllowedUIDs: job.AllowedUIDs, OpenFolder: job.OpenFolder, DrainTime: job.DrainTime,
		WorkerGrace: job.WorkerGrace, MaxClients: job.MaxClients, Grants: job.Grants, Limits: job.Limits, Logger: slog.New(handler)}
	for _, m := range job.Models {
		cfg.Models = append(cfg.Models, m.Config())
	}
	b, err := broker.New(cfg)
	if err != nil {
		return err
	}
	if err := c.Ready(); err != nil {
		return err
	}
	if err := b.Serve(c.Context()); err != nil {
		return err
	}
	return c.Tell("drained", nil)
}

// Settled returns an error if a model without users still has a client, a slot in use,
// or a request that did not end exactly once.
func Settled(m *stats.Model) error {
	ended := uint64(0)
	for _, n := range m.Ended {
		ended += n
	}
	if m.Clients != 0 || m.SlotsFree != m.Slots || m.QueueLength != 0 || m.Requests != ended {
		return fmt.Errorf("%s: %d clients, %d of %d slots free, %d queued, %d requests of which ended %v, workers %+v",
			m.Name, m.Clients, m.SlotsFree, m.Slots, m.QueueLength, m.Requests, m.Ended, m.Workers)
	}
	return nil
}
