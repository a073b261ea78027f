package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/status"
)

// signalStorm interrupts every system call of everybody, all the time.
func signalStorm(r *run) error {
	h, err := r.startHost(role{}, 2)
	if err != nil {
		return err
	}
	before := vitalsOf(h.broker.pid())
	if err := h.load(role{Load: 4, Pause: 500}); err != nil {
		return err
	}
	all := append([]*process{h.broker, h.loads[0]}, h.workers...)
	storm := []syscall.Signal{unix.SIGURG, unix.SIGPROF, unix.SIGUSR1, unix.SIGCHLD}
	for sent := 0; sent < r.events; {
		for _, p := range all {
			p.signal(storm[r.intn(len(storm))])
			sent++
		}
		time.Sleep(300 * time.Microsecond)
		r.progress(sent)
	}
	for _, p := range all {
		select {
		case <-p.ended:
			r.fail("a process died of signals: %s", p.last())
		default:
			r.pass()
		}
	}
	fmt.Printf("   %.1f signals per millisecond\n", float64(r.events)/float64(time.Since(r.start).Milliseconds()))
	h.endLoads()
	h.settled(before)
	return nil
}

func limits(r *run) error {
	if err := fewDescriptors(r); err != nil {
		return err
	}
	r.host.close()
	r.host = nil
	return fullDisk(r)
}

// fewDescriptors lets the broker run out of them: whoever comes then is
// refused with a name, whoever was there notices nothing.
func fewDescriptors(r *run) error {
	h, err := r.startHost(role{Files: 60}, 1)
	if err != nil {
		return err
	}
	if err := h.load(role{Load: 2, Pause: 1000}); err != nil {
		return err
	}
	var clients []*client.Client
	var refused error
	for refused == nil && len(clients) < 100 {
		ctx, cancel := context.WithTimeout(context.Background(), 8*time.Second)
		c, err := client.Dial(ctx, modelName, client.WithSocket(r.socket()), client.WithWindow(1))
		cancel()
		if err == nil {
			clients = append(clients, c)
		}
		refused = err
	}
	fmt.Printf("   no descriptors: %d clients attached, then: %v\n", len(clients), refused)
	var s status.Code
	r.check(errors.As(refused, &s), "out of descriptors, but a client was told: %v", refused)
	for _, c := range clients {
		_ = c.Close()
	}
	for end := time.Now().Add(3 * time.Second); ; time.Sleep(10 * time.Millisecond) { // until the broker has seen them leave
		c, err := client.Dial(context.Background(), modelName, client.WithSocket(r.socket()))
		if err == nil {
			_ = c.Close()
		}
		if err == nil || time.Now().After(end) {
			r.check(err == nil, "there are descriptors again, but: %v", err)
			break
		}
	}
	h.endLoads()
	return nil
}

// fullDisk has the broker log to a device that is always full.
func fullDisk(r *run) error {
	h, err := r.startHost(role{Log: "/dev/full"}, 1)
	if err != nil {
		return err
	}
	if err := h.load(role{Load: 2, Pause: 1000}); err != nil {
		return err
	}
	time.Sleep(500 * time.Millisecond)
	h.endLoads()
	fmt.Println("   log on a full disk: served")
	return nil
}

// stranger is a user that nobody knows.
const stranger = 54321

// access connects as another user. It needs root to become one.
func access(r *run) error {
	if os.Getuid() != 0 {
		fmt.Println("   skipped: only root can become another user")
		return nil
	}
	exe, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return err
	}
	if err := os.Chmod(r.dir, 0o711); err != nil {
		return err
	}
	copied := filepath.Join(r.dir, "chaos")
	if err := os.WriteFile(copied, exe, 0o755); err != nil {
		return err
	}
	for i, c := range []struct {
		about  string
		folder os.FileMode
		open   bool
		uids   []int
		start  bool
		attach bool
	}{
		{"private folder: a stranger cannot even reach the socket", 0o700, false, nil, true, false},
		{"private folder, stranger on the list: the folder still decides", 0o700, false, []int{stranger}, true, false},
		{"open folder, stranger not on the list", 0o755, true, nil, true, false},
		{"open folder, stranger on the list", 0o755, true, []int{stranger}, true, true},
		{"world-readable folder that nobody asked for: the broker refuses", 0o755, false, nil, false, false},
	} {
		dir := filepath.Join(r.dir, fmt.Sprint(i))
		if err := errors.Join(os.Mkdir(dir, c.folder), os.Chmod(dir, c.folder)); err != nil {
			return err
		}
		sock := filepath.Join(dir, "broker.sock")
		b, err := spawn(role{Kind: "broker", Socket: sock, Open: c.open, UIDs: c.uids, Lease: 1000}, func([]byte) {}, nil)
		if err != nil {
			return err
		}
		started := b.said("listening", 5*time.Second)
		r.check(started == c.start, "%s: broker started %v: %s", c.about, started, b.last())
		if started {
			said := pingAs(copied, sock, stranger)
			attached := strings.Contains(said, "attached")
			named := attached || strings.Contains(said, "may not use this broker")
			r.check(attached == c.attach && named, "%s: stranger attached %v: %s", c.about, attached, said)
			r.check(strings.Contains(pingAs(copied, sock, 0), "attached"), "%s: the broker's own user is refused", c.about)
		}
		b.end()
		fmt.Printf("   %s: ok\n", c.about)
	}
	return nil
}
