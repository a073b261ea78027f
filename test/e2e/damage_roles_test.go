// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"math/rand"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// playDamage attaches as a client would, then breaks every rule it can.
func playDamage(c *testbed.Child, j job) error {
	say := func(what string) { _ = c.Tell(what, nil) }
	ctx, cancel := context.WithTimeout(c.Context(), patience)
	defer cancel()
	switch j.Do {
	case "board":
		return j.tryBoard(ctx, say)
	case "chatter":
		return j.chatter(ctx, say)
	}
	req := &control.Request{Op: control.OpClient, Model: j.Model.Name, Window: j.Window}
	if strings.HasPrefix(j.Do, "worker") {
		req = workerRequest(j.Model.Name, j.Model.Signature())
	}
	s, err := attach.Open(ctx, j.Socket, req)
	if err != nil {
		return err
	}
	say("attached")
	rng := rand.New(rand.NewSource(j.Seed))
	words := s.Words.Bytes()
	switch j.Do {
	case "planes":
		// Overwrites the payload and its header page, then behaves.
		fill(rng, s.Planes.Bytes())
		say("done")
		s.Close()
		return nil
	case "scribble", "worker scribble":
		for {
			fill(rng, words)
			s.Doorbell.Ring()
			if gone(s) {
				break
			}
		}
	case "entries", "worker entries":
		// Plausible words, garbage in the entries.
		fill(rng, words[4096:])
		tail := (*[8]byte)(words[64:72])
		tail[0] = byte(1 + rng.Intn(j.Window))
		for s.Doorbell.Ring(); !gone(s); { // the broker reads a worker's ring while the worker has a batch
			s.Doorbell.Ring()
		}
	case "tail":
		words[71] = 0xff
		s.Doorbell.Ring()
	}
	s.Gone()
	say("thrown out")
	return nil
}

func workerRequest(model string, sig tensor.Signature) *control.Request {
	return &control.Request{Op: control.OpWorker, Model: model, Worker: &control.WorkerInfo{
		Inputs: tensor.SpecTexts(sig.Inputs), Outputs: tensor.SpecTexts(sig.Outputs), Depth: 2}}
}

// chatter sends bytes after attaching, which the protocol forbids.
func (j *job) chatter(ctx context.Context, say func(string)) error {
	c, err := attach.Dial(ctx, j.Socket)
	if err != nil {
		return err
	}
	defer c.Close()
	_, fds, err := attach.Call(ctx, c, &control.Request{Op: control.OpClient, Model: j.Model.Name, Window: 1})
	if err != nil {
		return err
	}
	defer control.CloseFDs(fds)
	say("attached")
	if _, err := c.Write([]byte("hello")); err != nil {
		return err
	}
	if _, err := c.Read(make([]byte, 1)); err == nil {
		return fmt.Errorf("the broker answered")
	}
	say("thrown out")
	return nil
}

func fill(rng *rand.Rand, mem []byte) {
	for i := range mem {
		mem[i] = byte(rng.Uint32())
	}
}

// gone reports whether the broker hung up, within 5 ms.
func gone(s *attach.Session) bool {
	ended := make(chan struct{})
	go func() { s.Gone(); close(ended) }()
	select {
	case <-ended:
		return true
	case <-time.After(5 * time.Millisecond):
		return false
	}
}

// tryBoard asks for more rights to the board than a client has.
func (j *job) tryBoard(ctx context.Context, say func(string)) error {
	c, err := attach.Dial(ctx, j.Socket)
	if err != nil {
		return err
	}
	defer c.Close()
	rep, fds, err := attach.Call(ctx, c, &control.Request{Op: control.OpClient, Model: j.Model.Name, Window: 1})
	if err != nil {
		return err
	}
	defer control.CloseFDs(fds)
	size := int(rep.Attached.BoardSize)
	if mem, err := unix.Mmap(fds[1], 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
		mem[4096] = 1
		return fmt.Errorf("mapped the board for writing")
	}
	say("mmap refused")
	if mem, err := unix.Mmap(fds[1], 0, size, unix.PROT_READ, unix.MAP_SHARED); err != nil {
		return fmt.Errorf("board cannot even be read: %w", err)
	} else if err := unix.Mprotect(mem, unix.PROT_READ|unix.PROT_WRITE); err == nil {
		return fmt.Errorf("made the board writable")
	}
	say("mprotect refused")
	if fd, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", fds[1]), unix.O_RDWR, 0); err == nil {
		_ = unix.Close(fd)
		say("open allowed")
	} else {
		say("open refused")
	}
	for i, fd := range fds[:3] {
		if err := unix.Ftruncate(fd, 4096); err == nil {
			return fmt.Errorf("segment %d shrank", i)
		}
	}
	say("truncate refused")
	return nil
}
