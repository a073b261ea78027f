// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"slices"
	"syscall"
	"testing"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/internal/must"
)

// faultyMPS stands in for nvidia-cuda-mps-control. Its server has faulted while there is a
// file fault in the folder of pipes, which ends with the server.
const faultyMPS = `#!/bin/sh
pipe=${CUDA_MPS_PIPE_DIRECTORY:?}
if [ "$1" = -d ]; then : > "$pipe/control"; exit 0; fi
read command server
[ -e "$pipe/control" ] || exit 1
case "$command" in
get_server_list) echo 4242 ;;
get_server_status) [ -e "$pipe/fault" ] && echo FAULT || echo ACTIVE ;;
shutdown_server) rm "$pipe/fault" ;;
quit) rm "$pipe/control" ;;
esac
`

func TestAFaultOfMPSDelaysRequestsAndFailsNone(t *testing.T) {
	bin := t.TempDir()
	must.Do(t, os.WriteFile(bin+"/nvidia-cuda-mps-control", []byte(faultyMPS), 0o700))
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	t.Setenv("CUDA_MPS_PIPE_DIRECTORY", bin+"/none")
	c := startCLI(t)
	c.ends(c.broker)
	c.write(c.served(2, 3, 0))
	c.broker = c.start("broker", "--config", c.config, "--mps")
	c.until("the broker answers", func() bool { _, code := c.run("stats"); return code == 0 })
	c.until("three workers serve", func() bool { return len(c.stats().Models[0].Workers) == 3 })
	l := c.load(8)
	before := c.pids()
	pipe := c.bed.Path("private/mps-b/pipe")
	must.Do(t, errors.Join(os.WriteFile(pipe+"/fault", nil, 0o600), syscall.Kill(before[0], syscall.SIGKILL)))
	c.until("three others serve", func() bool {
		workers := c.stats().Models[0].Workers
		return len(workers) == 3 && !slices.ContainsFunc(workers, func(w stats.Worker) bool { return slices.Contains(before, w.Pid) })
	})
	n := l.answers.Load()
	c.until("they answer", func() bool { return l.answers.Load() > n+100 || t.Failed() })
	l.end() // has failed the test if a request did
}
