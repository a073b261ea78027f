package main

import (
	"context"
	"log/slog"
	"os"

	"github.com/ringbatch/ringbatch/broker"
)

type brokerJob struct {
	Socket string
}

// brokerRole is the broker proper, as `ringbatch broker` runs it. Its models
// are declared by their workers.
func brokerRole(c *child) error {
	var job brokerJob
	if err := c.next(&job); err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	b, err := broker.New(broker.Config{Socket: job.Socket, Logger: log})
	if err != nil {
		return err
	}
	if err := c.ready(); err != nil {
		return err
	}
	return b.Serve(context.Background())
}

// startBroker starts one on a socket of the fleet's folder.
func (f *fleet) startBroker(name string) (*proc, string, error) {
	socket := f.path(name)
	p, err := f.start(spawn{role: "broker", job: brokerJob{socket}})
	return p, socket, err
}
