package main

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/worker"
)

// The torch model runs in a Python process, `python3 -m ringbatch.torch`,
// under the Go process that the benchmark started for it. $PYTHON names
// another Python; $TORCH_ARGS are more flags for it, like --cuda_graphs.

// torchSize is a guess: only the file knows its outputs.
func torchSize(j modelJob) (row, model int64, err error) {
	spec, err := j.input()
	if err != nil {
		return 0, 0, err
	}
	if j.Path == "" {
		return 0, 0, fmt.Errorf("%w: torch needs --model_path, a TorchScript file", shm.ErrInvalid)
	}
	st, err := os.Stat(j.Path)
	if err != nil {
		return 0, 0, err
	}
	const torchItself = 3 << 30 // what PyTorch with CUDA takes in a process
	return int64(spec.RowBytes()) + 4096, st.Size() + torchItself, nil
}

func openTorch(j modelJob) (*openModel, error) {
	spec, err := j.input()
	if err != nil {
		return nil, err
	}
	args := []string{"-m", "ringbatch.torch", j.Path, "--input", spec.String(), "--depth", strconv.Itoa(gpuLanes)}
	if j.DType == "f16" {
		args = append(args, "--half", "--channels_last")
	}
	args = append(args, strings.Fields(os.Getenv("TORCH_ARGS"))...)
	return &openModel{
		Alone: func(rows int) func() { return torchAlone(append(args, "--alone", strconv.Itoa(rows))) },
		Serve: func(cfg worker.Config) (int, func() error, error) {
			wait := cfg.WaitTime.Seconds()
			cmd := python(append(args, "--name", cfg.Model, "--socket", cfg.Socket, "--max_batch_size", strconv.Itoa(cfg.MaxBatchSize),
				"--slots", strconv.Itoa(cfg.Slots), "--wait_time", strconv.FormatFloat(max(0, wait), 'g', -1, 64)))
			cmd.Stdout = os.Stderr
			if err := cmd.Start(); err != nil {
				return 0, nil, err
			}
			return cmd.Process.Pid, cmd.Wait, nil
		},
	}, nil
}

// python is a Python process that ends with the thread that starts it, which
// the caller's goroutine therefore keeps.
func python(args []string) *exec.Cmd {
	runtime.LockOSThread()
	cmd := exec.Command(cmp.Or(os.Getenv("PYTHON"), "python3"), args...)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

// torchAlone starts the process; each run waits until one more batch is
// through, which it says by a byte on its standard output.
func torchAlone(args []string) func() {
	cmd := python(args)
	out, err := cmd.StdoutPipe()
	must(err)
	must(cmd.Start())
	r := bufio.NewReaderSize(out, 1)
	return func() {
		_, err := r.ReadByte()
		if err == io.EOF {
			err = cmd.Wait()
		}
		must(err)
	}
}
