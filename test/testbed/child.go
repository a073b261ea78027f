// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"
)

// Roles of the bed's processes, by name.
type Roles map[string]func(*Child) error

// With makes a role of a function that takes its job.
func With[J any](play func(*Child, J) error) func(*Child) error {
	return func(c *Child) error {
		var job J
		if err := json.Unmarshal(c.job, &job); err != nil {
			return fmt.Errorf("read the job: %w", err)
		}
		return play(c, job)
	}
}

// Child is the bed's process seen from inside.
type Child struct {
	ctx      context.Context
	job      json.RawMessage
	commands chan json.RawMessage
	mu       sync.Mutex
	out      *json.Encoder
}

// Play runs the role of a process that a bed started, and exits; in any other process
// it does nothing. The parent receives the role's error. A role whose parent is gone is
// ended.
func Play(roles Roles) {
	if name, ok := os.LookupEnv(roleEnv); ok {
		_ = os.Unsetenv(roleEnv) // children of this process have no role
		os.Exit(play(name, roles[name]))
	}
}

func play(name string, role func(*Child) error) int {
	if role == nil {
		fmt.Fprintf(os.Stderr, "no role %q\n", name)
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	c := &Child{ctx: ctx, commands: make(chan json.RawMessage), out: json.NewEncoder(os.Stdout)}
	in := json.NewDecoder(os.Stdin)
	var o order
	err := in.Decode(&o)
	if err == nil {
		err = o.Limits.apply()
	}
	if err == nil {
		c.job = o.Job
		go c.listen(in)
		err = role(c)
	}
	if err != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		_ = c.out.Encode(message{Error: err.Error()})
		return 1
	}
	return 0
}

func (c *Child) listen(in *json.Decoder) {
	for {
		var m json.RawMessage
		if err := in.Decode(&m); err != nil {
			if err != io.EOF {
				fmt.Fprintln(os.Stderr, "commands:", err)
			}
			os.Exit(3) // the parent is gone
		}
		c.commands <- m
	}
}

// Context ends at SIGTERM.
func (c *Child) Context() context.Context { return c.ctx }

// Commands that follow the job.
func (c *Child) Commands() <-chan json.RawMessage { return c.commands }

// Next waits for a command.
func (c *Child) Next(into any) error { return json.Unmarshal(<-c.commands, into) }

// Tell sends a message of that name to the parent.
func (c *Child) Tell(name string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.out.Encode(message{Name: name, Data: data})
}

// Ready sends "ready".
func (c *Child) Ready() error { return c.Tell("ready", nil) }

// Serve sends "ready" and then answers every command.
func Serve[C, R any](c *Child, answer func(C) (R, error)) error {
	if err := c.Ready(); err != nil {
		return err
	}
	for {
		var command C
		if err := c.Next(&command); err != nil {
			return err
		}
		r, err := answer(command)
		if err != nil {
			return err
		}
		if err := c.Tell("answer", r); err != nil {
			return err
		}
	}
}
