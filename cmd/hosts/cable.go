// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A cable links two namespaces by tap devices and this process, which delays
// and loses frames: for kernels without netem.

type cableQuality struct {
	delay time.Duration
	loss  float64
}

// plug makes a tap device in a namespace; the calling thread stays there.
func plug(namespace, device string) (*os.File, error) {
	ns, err := os.Open("/run/netns/" + namespace)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
		return nil, fmt.Errorf("enter %s: %w", namespace, err)
	}
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	var request struct {
		name  [unix.IFNAMSIZ]byte
		flags uint16
		_     [22]byte
	}
	copy(request.name[:], device)
	request.flags = unix.IFF_TAP | unix.IFF_NO_PI
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TUNSETIFF, uintptr(unsafe.Pointer(&request))); errno != 0 {
		return nil, fmt.Errorf("tap %s: %w", device, errno)
	}
	return os.NewFile(uintptr(fd), device), nil
}

// runCable carries frames until its standard input ends; lines there say how
// badly: DELAY LOSS.
func runCable(ctx context.Context, r *roleFlags) error {
	runtime.LockOSThread()
	var ends [2]*os.File
	for i, where := range [2][2]string{{r.ends[0], r.ends[1]}, {r.ends[2], r.ends[3]}} {
		var err error
		if ends[i], err = plug(where[0], where[1]); err != nil {
			return err
		}
	}
	var quality atomic.Pointer[cableQuality]
	quality.Store(&cableQuality{})
	fmt.Println("plugged")
	failed := make(chan error, 2)
	for i := range ends {
		go func() { failed <- carry(ends[i], ends[1-i], &quality) }()
	}
	go func() {
		lines := bufio.NewScanner(os.Stdin)
		for lines.Scan() {
			var delay string
			q := cableQuality{}
			if _, err := fmt.Sscan(lines.Text(), &delay, &q.loss); err == nil {
				q.delay, _ = time.ParseDuration(delay)
				quality.Store(&q)
			}
		}
		failed <- nil
	}()
	select {
	case <-ctx.Done():
		return nil
	case err := <-failed:
		return err
	}
}

type frame struct {
	due  time.Time
	data []byte
}

// carry moves frames from one end to the other, in order, each after its delay.
func carry(from, to *os.File, quality *atomic.Pointer[cableQuality]) error {
	line := make(chan frame, 1<<14)
	go func() {
		for f := range line {
			time.Sleep(time.Until(f.due))
			_, _ = to.Write(f.data)
		}
	}()
	defer close(line)
	for {
		data := make([]byte, 64<<10)
		n, err := from.Read(data)
		if err != nil {
			if errors.Is(err, os.ErrClosed) {
				return nil
			}
			return err
		}
		q := quality.Load()
		if q.loss > 0 && rand.Float64() < q.loss {
			continue
		}
		select {
		case line <- frame{time.Now().Add(q.delay), data[:n]}:
		default: // a queue that is full loses what comes
		}
	}
}
