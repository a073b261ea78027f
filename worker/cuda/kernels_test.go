// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"bytes"
	"encoding/binary"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
)

// The kernels' arithmetic on the CPU: their sources, compiled by the host's
// C++ compiler (kernels/host).
func TestKernelsOnHost(t *testing.T) {
	if testing.Short() {
		t.Skip("the kernels run in another process, which the race detector does not see")
	}
	cxx, err := exec.LookPath("c++")
	if err != nil {
		t.Skip("no C++ compiler here")
	}
	bin := filepath.Join(t.TempDir(), "kernels")
	args := []string{"-std=c++20", "-O2", "-pthread", "-fno-strict-aliasing", "-ffp-contract=off", "kernels/host/run.cc", "-o", bin}
	if out, err := exec.Command(cxx, args...).CombinedOutput(); err != nil {
		t.Fatalf("compile kernels for the host: %v\n%s", err, out)
	}
	for _, v := range vectors() {
		t.Run(v.name, func(t *testing.T) {
			after, err := runOnHost(bin, &v)
			must.Do(t, err)
			must.Check(t, v.check(after))
		})
	}
}

func runOnHost(bin string, v *vector) ([][]byte, error) {
	var in, errs bytes.Buffer
	in.WriteString(v.kernel + "\x00")
	put := func(n uint64) { _ = binary.Write(&in, binary.LittleEndian, n) }
	for _, n := range []int{v.gridX, v.gridY, v.block, len(v.args)} {
		put(uint64(n))
	}
	for _, a := range v.args {
		switch a := a.(type) {
		case []byte:
			put(uint64(len(a)))
			in.Write(a)
		case uint64:
			put(^uint64(0))
			put(a)
		}
	}
	cmd := exec.Command(bin)
	cmd.Stdin, cmd.Stderr = &in, &errs
	out, err := cmd.Output()
	if err != nil {
		return nil, err
	}
	var after [][]byte
	for _, a := range v.args {
		if b, ok := a.([]byte); ok {
			after = append(after, out[:len(b)])
			out = out[len(b):]
		}
	}
	return after, nil
}
