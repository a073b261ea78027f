// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/tensor"
)

// freePort returns a port that is free now.
func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must.Do(t, err)
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	return port
}

// tritonModel doubles; a batch with an odd number in it fails.
const tritonModel = `import numpy as np
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for r in requests:
            x = pb.get_input_tensor_by_name(r, "x").as_numpy()
            if (x % 2).any():
                answers.append(pb.InferenceResponse(error=pb.TritonError("an odd number")))
            else:
                answers.append(pb.InferenceResponse([pb.Tensor("y", x * 2)]))
        return answers
`

// triton is a real Triton server, with the models "m" of one number and
// "ids" of as many as one likes.
type triton struct {
	t              *testing.T
	packages, venv string
	dir            string
	port           string
	cmd            *exec.Cmd
}

func newTriton(t *testing.T) *triton {
	t.Helper()
	s := &triton{t: t, packages: os.Getenv("TRITON_PACKAGES"), venv: os.Getenv("TRITON_VENV"), dir: t.TempDir(), port: freePort(t)}
	if s.packages == "" {
		t.Skip("TRITON_PACKAGES is not set; make triton-test installs a Triton and runs this")
	}
	home := filepath.Join(s.packages, "pytriton", "tritonserver")
	must.Do(t, os.CopyFS(filepath.Join(s.dir, "backends"), os.DirFS(filepath.Join(home, "backends"))))
	stub, err := os.Open(filepath.Join(home, "python_backend_stubs", os.Getenv("TRITON_STUB"), "triton_python_backend_stub"))
	must.Do(t, err)
	defer stub.Close()
	to, err := os.OpenFile(filepath.Join(s.dir, "backends", "python", "triton_python_backend_stub"), os.O_CREATE|os.O_WRONLY, 0o755)
	if err == nil {
		_, err = io.Copy(to, stub)
		to.Close()
	}
	must.Do(t, err)
	for name, dims := range map[string]string{"m": "1", "ids": "-1"} {
		folder := filepath.Join(s.dir, "models", name)
		config := fmt.Sprintf("backend: \"python\"\nmax_batch_size: 8\ninput [{ name: \"x\" data_type: TYPE_INT32 dims: [%s] }]\n"+
			"output [{ name: \"y\" data_type: TYPE_INT32 dims: [%s] }]\ninstance_group [{ kind: KIND_CPU count: 1 }]\n", dims, dims)
		for file, text := range map[string]string{"config.pbtxt": config, "1/model.py": tritonModel} {
			path := filepath.Join(folder, file)
			must.Do(t, os.MkdirAll(filepath.Dir(path), 0o755))
			must.Do(t, os.WriteFile(path, []byte(text), 0o644))
		}
	}
	s.start()
	t.Cleanup(s.stop)
	return s
}

func (s *triton) start() {
	s.t.Helper()
	s.cmd = exec.Command(filepath.Join(s.packages, "pytriton", "tritonserver", "bin", "tritonserver"), "--model-repository",
		filepath.Join(s.dir, "models"),
		"--backend-directory", filepath.Join(s.dir,
			"backends"), "--grpc-address", "127.0.0.1", "--grpc-port", s.port, "--allow-http", "false", "--allow-metrics", "false",
		"--log-info", "false", "--log-warning", "false")
	s.cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+filepath.Join(s.packages, "nvidia_pytriton.libs")+":"+os.Getenv("TRITON_LIBPYTHON"),
		"PATH="+filepath.Join(s.venv, "bin")+":"+os.Getenv("PATH"), "PYTHONPATH="+s.packages)
	s.cmd.Stdout, s.cmd.Stderr = os.Stderr, os.Stderr
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	must.Do(s.t, s.cmd.Start())
}

func (s *triton) stop() {
	_ = s.cmd.Process.Signal(syscall.SIGTERM)
	_ = s.cmd.Wait()
}

func TestTheFarSideMayBeTriton(t *testing.T) {
	s := newTriton(t)
	l := newLocal(t, nil, "127.0.0.1:"+s.port)
	c := l.dial()
	for round := range 2 { // the second time with a restarted server
		if round > 0 {
			s.stop()
			l.eventually("it is left", func() bool { return l.log.Has("host left") })
			s.start()
		}
		l.eventually("it is answered", func() bool {
			q := commit(t, c, 2)[0]
			defer q.Release()
			return q.Wait(soon(t)) == nil && number(t, q) == 4
		})
		var all sync.WaitGroup
		for g := range 8 {
			all.Go(func() {
				for i := range int32(50) {
					v := 2 * (int32(g)*1000 + i)
					q := commit(t, c, v)[0]
					if err := q.Wait(soon(t)); err != nil || number(t, q) != 2*v {
						t.Errorf("%d: %v", v, err)
					}
					_ = q.Release()
				}
			})
		}
		all.Wait()
		odd := commit(t, c, 5)[0]
		if err := odd.Wait(soon(t)); err == nil || !strings.Contains(err.Error(), "an odd number") {
			t.Errorf("its error: %v", err)
		}
		_ = odd.Release()
	}
}

func TestOpenDimensionsOfTritonAreGivenByTheUser(t *testing.T) {
	s := newTriton(t)
	ids := func(c *Config) { c.Remote, c.Policy = "ids", policy.New(policy.WaitTime(0), policy.Slots(64)) }
	l := newLocal(t, ids, "127.0.0.1:"+s.port)
	l.eventually("it is said what is missing", func() bool { return l.log.Has("say how large it can be") })

	l = newLocal(t, func(c *Config) {
		ids(c)
		for text, to := range map[string]*[]tensor.Spec{"x:i32[<=9]": &c.Inputs, "y:i32[<=9]": &c.Outputs} {
			spec, err := tensor.ParseSpec(text)
			must.Do(t, err)
			*to = []tensor.Spec{spec}
		}
	}, "127.0.0.1:"+s.port)
	c := l.dial()
	var all sync.WaitGroup
	for n := range 9 {
		all.Go(func() {
			var in, want []byte
			for k := range n + 1 {
				in = binary.LittleEndian.AppendUint32(in, uint32(2*k))
				want = binary.LittleEndian.AppendUint32(want, uint32(4*k))
			}
			outs, err := c.Infer(soon(t), tensor.Tensor{Name: "x", DType: tensor.I32, Shape: []int{1, n + 1}, Data: in})
			if err != nil || !bytes.Equal(outs[0].Data, want) {
				t.Errorf("%d numbers: %v, %v", n+1, outs, err)
			}
		})
	}
	all.Wait()
}
