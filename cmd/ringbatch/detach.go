// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/status"
)

const detachPause = 10 * time.Millisecond // between looks at a broker that starts

// detachBroker starts `ringbatch broker` with these arguments, less --detach, as a process
// that outlives this one. Of brokers that start at once, the socket's lock leaves one.
func detachBroker(ctx context.Context, socket string, userConfig bool, args []string) error {
	socket, err := filepath.Abs(control.SocketPath(socket))
	if err == nil && isListening(socket) {
		if !userConfig {
			fmt.Fprintf(os.Stderr, "note: the broker that runs at %s keeps its own configuration\n", socket)
		}
		return nil
	}
	if err != nil {
		return err
	}
	args = slices.DeleteFunc(slices.Clone(args), func(arg string) bool { return arg == "--detach" || arg == "--detach=true" })
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.Command(self, append(append([]string{"broker"}, args...), "--socket", socket)...)
	if userConfig {
		folder, err := os.UserConfigDir()
		config := filepath.Join(folder, "ringbatch", "ringbatch.toml")
		if err == nil {
			_, err = os.Stat(config)
		}
		if err != nil {
			return fmt.Errorf("no broker runs, and none can be started: %w; write a configuration with models there", err)
		}
		cmd.Args, cmd.Dir = append(cmd.Args, "--config", config), filepath.Dir(config)
	}
	if err := os.Mkdir(filepath.Dir(socket), 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("socket folder: %w", err)
	}
	log, err := os.OpenFile(socket+".log", os.O_CREATE|os.O_RDWR|os.O_APPEND|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return fmt.Errorf("the broker's log: %w", err)
	}
	defer log.Close()
	if st, err := log.Stat(); err != nil || st.Sys().(*syscall.Stat_t).Uid != uint32(os.Getuid()) {
		return fmt.Errorf("the broker's log: %s belongs to another user", log.Name())
	}
	before, _ := log.Seek(0, io.SeekEnd)
	cmd.Stdout, cmd.Stderr, cmd.SysProcAttr = log, log, &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for !isListening(socket) {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(detachPause):
		case err := <-ended:
			said := make([]byte, 64<<10)
			n, _ := log.ReadAt(said, before)
			lines := strings.Split(string(bytes.TrimSpace(said[:n])), "\n")
			last := lines[len(lines)-1]
			if err == nil || isListening(socket) || strings.Contains(last, status.ErrBrokerRunning.Error()) {
				return nil // another one was quicker, or it has ended since
			}
			return fmt.Errorf("the broker did not start, %w: %s; its log is %s", err, last, log.Name())
		}
	}
	return nil
}

func isListening(socket string) bool {
	c, err := net.Dial("unix", socket)
	if err == nil {
		_ = c.Close()
	}
	return err == nil || errors.Is(err, syscall.EAGAIN) // its queue of connections is full
}
