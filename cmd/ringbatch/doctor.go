// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/internal/cgroup"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// finding is the result of one check.
type finding struct {
	What   string `json:"what"`
	State  string `json:"state"` // ok, note, bad
	Detail string `json:"detail"`
	Do     string `json:"do,omitempty"`
}

func runDoctor(ctx context.Context, args []string) error {
	f := flags("doctor", "", `Check this machine for everything that ringbatch needs, and suggest fixes. Exit status 1 if ringbatch
cannot work here.`, "")
	socket := socketFlag(f)
	asJSON := f.Bool("json", false, "print JSON")
	if err := parse(f, args, 0, 0); err != nil {
		return err
	}
	findings := []finding{checkKernel(), checkMemfd(), checkPidfd(), checkSlices(), checkMemory(), checkFiles(), checkFolder(*socket),
		checkBroker(ctx, *socket), checkWorkers(ctx, *socket), checkGPU(ctx), checkMPS()}
	bad, text := false, ""
	for _, d := range findings {
		bad = bad || d.State == "bad"
		text += fmt.Sprintf("%-4s  %-14s %s\n", d.State, d.What, d.Detail)
		if d.Do != "" {
			text += fmt.Sprintf("      %-14s → %s\n", "", d.Do)
		}
	}
	var err error
	if *asJSON {
		err = json.NewEncoder(os.Stdout).Encode(findings)
	} else {
		_, err = os.Stdout.WriteString(text)
	}
	if err == nil && bad {
		return exitCode(1)
	}
	return err
}

func checkKernel() finding {
	var u unix.Utsname
	_ = unix.Uname(&u)
	release := unix.ByteSliceToString(u.Release[:])
	d := finding{What: "kernel", State: "ok", Detail: release}
	var major, minor int
	_, _ = fmt.Sscanf(release, "%d.%d", &major, &minor)
	switch at := major*100 + minor; {
	case at < 503:
		d.State, d.Do = "bad", "ringbatch needs Linux 5.3 or later (pidfd)"
	case at < 514:
		d.State, d.Do = "note", "works; from Linux 5.14 on the first requests avoid page faults, from 5.11 on wait times are exact"
	}
	return d
}

func checkMemfd() finding {
	s, err := shm.Create("doctor", 1<<20)
	if err != nil {
		return finding{"shared memory", "bad", err.Error(), "allow memfd_create (a seccomp profile may forbid it)"}
	}
	defer s.Close()
	fd, err := s.ReadOnlyFD()
	if err != nil {
		return finding{"shared memory", "bad", err.Error(), "mount /proc"}
	}
	_ = unix.Close(fd)
	return finding{What: "shared memory", State: "ok", Detail: "sealed memfd works; /dev/shm and its size do not matter"}
}

func checkPidfd() finding {
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		return finding{"pidfd", "bad", err.Error(), "allow pidfd_open (a seccomp profile may forbid it)"}
	}
	_ = unix.Close(fd)
	return finding{What: "pidfd", State: "ok", Detail: "the death of a peer is noticed at once"}
}

func checkSlices() finding {
	d := finding{What: "time slices", State: "ok", Detail: "short slices work: the broker runs soon after a wake-up on busy cores"}
	switch {
	case os.Getenv(shm.SliceVariable) == "off":
		d.State, d.Detail = "note", "short slices are switched off by "+shm.SliceVariable
	case !shm.ShortSliceWorks():
		d.State, d.Detail = "note", "no short slices"
		d.Do = "works; from Linux 6.12 on requests wait less where all cores are busy"
	}
	return d
}

func checkMemory() finding {
	var si unix.Sysinfo_t
	_ = unix.Sysinfo(&si)
	d := finding{What: "memory", State: "ok", Detail: fmt.Sprintf("%d MiB, %d MiB free", uint64(si.Totalram)*uint64(si.Unit)>>20,
		uint64(si.Freeram)*uint64(si.Unit)>>20)}
	var rl unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_AS, &rl) == nil && rl.Cur != unix.RLIM_INFINITY {
		d.State, d.Do = "note", fmt.Sprintf("address space is limited to %d MiB (ulimit -v); rings larger than that cannot be mapped",
			rl.Cur>>20)
	}
	if room, limited := cgroup.Tightest(); limited {
		d.Detail += fmt.Sprintf(", %d of %d MiB left in the memory cgroup %s", room.Left>>20, room.Limit>>20, room.Group)
	}
	if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &rl) == nil && rl.Cur != unix.RLIM_INFINITY {
		d.Detail += fmt.Sprintf(", %d MiB lockable", rl.Cur>>20)
	}
	return d
}

func checkFiles() finding {
	var rl unix.Rlimit
	_ = unix.Getrlimit(unix.RLIMIT_NOFILE, &rl)
	d := finding{What: "descriptors", State: "ok", Detail: fmt.Sprintf("%d (limit %d): the broker needs 3 per client or worker",
		rl.Cur, rl.Max)}
	if rl.Cur < 1024 {
		d.State, d.Do = "note", "raise it with ulimit -n 4096 for more than a few hundred clients"
	}
	return d
}

func checkFolder(given string) finding {
	path := control.SocketPath(given)
	d := finding{What: "socket", State: "ok", Detail: path}
	var st unix.Stat_t
	err := unix.Stat(filepath.Dir(path), &st)
	switch {
	case len(path) > broker.MaxSocketPath:
		d.State, d.Do = "bad", fmt.Sprintf("its path has %d bytes, at most %d: choose another with --socket",
			len(path), broker.MaxSocketPath)
	case errors.Is(err, os.ErrNotExist):
		d.Detail += " (its folder is made when the broker starts)"
	case err != nil:
		d.State, d.Do = "bad", err.Error()
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		d.State, d.Do = "bad", fmt.Sprintf("%s is not a folder: choose another with --socket", filepath.Dir(path))
	case int(st.Uid) != os.Getuid() && st.Uid != 0:
		d.State, d.Do = "note", fmt.Sprintf("its folder belongs to uid %d: a broker of this user cannot serve there; choose another "+
			"with --socket", st.Uid)
	case st.Mode&0o077 != 0:
		d.State, d.Do = "note", fmt.Sprintf("its folder has mode %04o: the broker refuses it without --open-folder; chmod 700, or "+
			"another --socket", st.Mode&0o777)
	}
	return d
}

func checkBroker(ctx context.Context, given string) finding {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	b, err := admin.New(given).Ping(ctx)
	if err == nil {
		return finding{What: "broker", State: "ok", Detail: fmt.Sprintf("runs, pid %d", b.Pid)}
	}
	if errors.Is(err, status.ErrNoBroker) {
		return finding{"broker", "note", "none is running", "start one: ringbatch broker"}
	}
	return finding{"broker", "bad", err.Error(), "see the broker's log"}
}

// checkWorkers checks the worker processes of a running broker.
func checkWorkers(ctx context.Context, socket string) finding {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	d := finding{What: "workers", State: "ok"}
	_, s, err := fetchStats(ctx, socket)
	if err != nil || len(s.Processes) == 0 {
		d.Detail = "the broker starts none; declare them with [[model.worker]], or start them by hand"
		return d
	}
	up := 0
	for _, p := range s.Processes {
		if p.State == "running" {
			up++
			continue
		}
		d.State, d.Do = "note", fmt.Sprintf("%s is %s after %d restarts (%s): %s", p.Name, p.State, p.Restarts, p.LastEnd, p.Command)
	}
	d.Detail = fmt.Sprintf("%d of %d declared processes run, MPS: %s", up, len(s.Processes), s.MPS)
	return d
}

func checkGPU(ctx context.Context) finding {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, "nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_mode",
		"--format=csv,noheader").Output()
	if err != nil {
		return finding{What: "GPU", State: "note", Detail: "no GPU here; CPU workers work"}
	}
	return finding{What: "GPU", State: "ok", Detail: strings.ReplaceAll(strings.TrimSpace(string(out)), "\n", "; ")}
}

func checkMPS() finding {
	if _, err := exec.LookPath("nvidia-cuda-mps-control"); err != nil {
		return finding{What: "MPS", State: "note", Detail: "no MPS here; several GPU workers would take turns instead of sharing"}
	}
	pipe := cmp.Or(os.Getenv("CUDA_MPS_PIPE_DIRECTORY"), "/tmp/nvidia-mps")
	if _, err := os.Stat(filepath.Join(pipe, "control")); err != nil {
		return finding{"MPS", "note", "installed, no daemon runs", "start one: nvidia-cuda-mps-control -d"}
	}
	return finding{What: "MPS", State: "ok", Detail: "daemon runs, pipe " + pipe}
}
