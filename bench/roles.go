package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"
)

// child is a process of the fleet, seen from inside.
type child struct {
	commands chan json.RawMessage
	mu       sync.Mutex
	out      *json.Encoder
}

// roles are what a process of the fleet can be.
func roles() map[string]func(*child) error {
	return map[string]func(*child) error{
		"broker":        brokerRole,
		"echo worker":   echoWorkerRole,
		"transport":     transportRole,
		"futex ping":    futexPingRole,
		"futex pong":    futexPongRole,
		"socket server": socketServerRole,
		"socket client": socketClientRole,
		"model worker":  modelWorkerRole,
		"alone":         aloneRole,
		"producer":      producerRole,

		"supervised broker": supervisedBrokerRole,
		"steady producer":   steadyProducerRole,
	}
}

// runRole is the whole life of a child. It ends when its parent closes its
// standard input, or dies.
func runRole(name string) int {
	signal.Ignore(syscall.SIGINT)
	_ = os.WriteFile("/proc/self/comm", []byte("bench "+name), 0) // for top and perf
	c := &child{commands: make(chan json.RawMessage), out: json.NewEncoder(os.Stdout)}
	role := roles()[name]
	if role == nil {
		fmt.Fprintf(os.Stderr, "no role %q\n", name)
		return 2
	}
	go c.listen()
	if err := role(c); err != nil {
		_ = c.out.Encode(answer{Error: err.Error()})
		return 1
	}
	return 0
}

func (c *child) listen() {
	in := json.NewDecoder(os.Stdin)
	for {
		var m json.RawMessage
		if err := in.Decode(&m); err != nil {
			if err != io.EOF {
				fmt.Fprintln(os.Stderr, "commands:", err)
			}
			os.Exit(0)
		}
		c.commands <- m
	}
}

// next waits for a command.
func (c *child) next(into any) error { return json.Unmarshal(<-c.commands, into) }

// tell answers.
func (c *child) tell(v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.out.Encode(answer{Data: data})
}

// ready says that the child is set up.
func (c *child) ready() error { return c.tell(nil) }
