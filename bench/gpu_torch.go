// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/ringbatch/ringbatch/internal/policyflag"
	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/worker"
)

// The torch model runs in a Python process, `python3 -m ringbatch.torch`, under the Go
// process of its worker. $PYTHON names another Python; $TORCH_ARGS are further flags,
// like --cuda-graphs.
//
// The bound is processes with one batch each: copied from pinned memory, computed,
// copied back, then the next. With $BOUND_LANES=2 they copy one batch while another
// computes: a harder bound, with more rows in flight than the producers may have.

func checkTorch(j modelJob) error {
	if j.Path == "" {
		return fmt.Errorf("%w: torch needs --model_path, a file or an import path (module:name)", status.ErrInvalid)
	}
	_, err := j.input()
	return err
}

// isImportPath reports whether path is module:name, and not a file.
func isImportPath(path string) bool {
	_, err := os.Stat(path)
	return err != nil && strings.Contains(path, ":")
}

// torchArgs are the flags of every torch process.
func torchArgs(j modelJob) ([]string, error) {
	spec, err := j.input()
	if err != nil {
		return nil, err
	}
	args := []string{"-m", "ringbatch.torch", j.Path, "--input", spec.String(), "--depth", strconv.Itoa(gpuLanes())}
	if j.DType == "f16" {
		args = append(args, "--half", "--channels-last")
	}
	return append(args, strings.Fields(os.Getenv("TORCH_ARGS"))...), nil
}

func openTorch(j modelJob) (*openModel, error) {
	args, err := torchArgs(j)
	if err != nil {
		return nil, err
	}
	return &openModel{
		Alone: func(rows int) func() {
			return torchAlone(append(args, "--depth", cmp.Or(os.Getenv("BOUND_LANES"), "1"), "--alone", strconv.Itoa(rows)))
		},
		Serve: func(cfg worker.Config) (int, func() error, error) {
			args := append(slices.Clone(args), "--name", cfg.Model, "--socket", cfg.Socket)
			for key, value := range cfg.Policy {
				args = append(args, "--"+policyflag.Name(key)+"="+value)
			}
			cmd := python(args)
			said := &progress.Tail{} // its last lines say why it ended
			cmd.Stdout, cmd.Stderr = os.Stderr, io.MultiWriter(os.Stderr, said)
			if err := cmd.Start(); err != nil {
				return 0, nil, err
			}
			return cmd.Process.Pid, func() error { return fmt.Errorf("python ended (%v): %s", cmd.Wait(), said) }, nil
		},
	}, nil
}

// python is a Python process that ends with its parent thread, so the caller's
// goroutine keeps its thread.
func python(args []string) *exec.Cmd {
	runtime.LockOSThread()
	cmd := exec.Command(cmp.Or(os.Getenv("PYTHON"), "python3"), args...)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

// torchAlone starts the process. Each run asks for one more batch by a byte on
// its standard input, and waits for a byte on its standard output.
func torchAlone(args []string) func() {
	cmd := python(args)
	in, err := cmd.StdinPipe()
	exitOn(err)
	out, err := cmd.StdoutPipe()
	exitOn(err)
	exitOn(cmd.Start())
	r := bufio.NewReaderSize(out, 1)
	return func() {
		_, err := in.Write([]byte{'.'})
		exitOn(err)
		answer, err := r.ReadByte()
		if err == io.EOF {
			err = cmd.Wait()
		} else if err == nil && answer != '.' { // stray output would count as batches
			err = fmt.Errorf("the model process wrote %q instead of an answer", answer)
		}
		exitOn(err)
	}
}

// gpuLanes is the batches in flight of a model process on the GPU: $GPU_LANES, or two.
func gpuLanes() int {
	if n, err := strconv.Atoi(os.Getenv("GPU_LANES")); err == nil && n > 0 {
		return n
	}
	return 2
}

// exitOn ends a child whose model failed; its parent shows the log.
func exitOn(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
