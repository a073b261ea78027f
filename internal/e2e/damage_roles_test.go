package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/tensor"
)

// forkSleeper starts a child that inherits this process's connections to
// brokers and sleeps.
func forkSleeper() (int, error) {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0, err
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return 0, err
	}
	files := []uintptr{null.Fd(), null.Fd(), null.Fd()} // not ours: the test reads them to their end
	for _, e := range entries {
		fd, _ := strconv.Atoi(e.Name())
		if to, _ := os.Readlink("/proc/self/fd/" + e.Name()); fd > 2 && strings.HasPrefix(to, "socket:") {
			files = append(files, uintptr(fd))
		}
	}
	if len(files) == 3 {
		return 0, fmt.Errorf("no connection to inherit")
	}
	text, _ := json.Marshal(role{Kind: "damage", Do: "sleep"})
	return syscall.ForkExec("/proc/self/exe", []string{"sleeper"}, &syscall.ProcAttr{
		Env: []string{roleEnv + "=" + string(text)}, Files: files,
	})
}

// playDamage attaches as a client would, then breaks every rule it can.
func (r *role) playDamage() error {
	if r.Do == "sleep" {
		time.Sleep(time.Minute)
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	switch r.Do {
	case "board":
		return r.tryBoard(ctx)
	case "chatter":
		return r.chatter(ctx)
	}
	req := &control.Request{Op: control.OpClient, Model: r.Model.Name, Window: r.Window}
	if strings.HasPrefix(r.Do, "worker") {
		m := r.Model
		req = &control.Request{Op: control.OpWorker, Model: m.Name, Worker: &control.WorkerInfo{
			Inputs: tensor.SpecTexts(m.signature().Inputs), Outputs: tensor.SpecTexts(m.signature().Outputs), Depth: 2}}
	}
	s, err := attach.Open(ctx, r.Socket, shm.Memfd{}, req)
	if err != nil {
		return err
	}
	say("attached")
	rng := rand.New(rand.NewSource(r.Seed))
	words := s.Words.Bytes()
	switch r.Do {
	case "planes":
		// Every byte of the payload, the header page included; then it
		// behaves.
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
		// Believable words, garbage in the entries.
		fill(rng, words[4096:])
		tail := (*[8]byte)(words[64:72])
		tail[0] = byte(1 + rng.Intn(r.Window))
		s.Doorbell.Ring()
	case "tail":
		words[71] = 0xff
		s.Doorbell.Ring()
	}
	s.Gone()
	say("thrown out")
	return nil
}

// chatter speaks on a connection that only its end should be heard of.
func (r *role) chatter(ctx context.Context) error {
	c, err := attach.Dial(ctx, r.Socket)
	if err != nil {
		return err
	}
	defer c.Close()
	_, fds, err := attach.Call(ctx, c, &control.Request{Op: control.OpClient, Model: r.Model.Name, Window: 1})
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

// gone asks, without waiting long, whether the broker hung up.
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
func (r *role) tryBoard(ctx context.Context) error {
	c, err := attach.Dial(ctx, r.Socket)
	if err != nil {
		return err
	}
	defer c.Close()
	rep, fds, err := attach.Call(ctx, c, &control.Request{Op: control.OpClient, Model: r.Model.Name, Window: 1})
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
