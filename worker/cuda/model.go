//go:build cuda

package cuda

import (
	"fmt"
	"strings"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/worker"
)

// Model is a model on the GPU, ready to be served.
type Model struct {
	Signature shm.Signature
	Note      string // what a user should know about it
	options   Options
	load      func(*device) (program, error)
}

// program is a model whose kernels and weights are on the device.
type program interface {
	// inPlace says that outputs take the place of inputs.
	inPlace() bool
	// prepare makes whatever else the model needs per lane.
	prepare(l *lane, layout *shm.Layout) error
	// enqueue queues the kernels that turn l.in into l.out.
	enqueue(l *lane) error
	// finish may still set output dimensions before the answer.
	finish(b *worker.Batch) error
}

// New makes the built-in model of that name. It checks what can be checked
// without touching the GPU, and that there is one.
func New(name string, o Options) (*Model, error) {
	if err := load(); err != nil {
		return nil, err
	}
	return newModel(name, o)
}

func newModel(name string, o Options) (*Model, error) {
	kinds := map[string]func(Options) (*Model, error){"echo": newEcho, "affine": newAffine, "mlp": newMLP, "ptx": newPTX}
	make, ok := kinds[name]
	if !ok {
		return nil, fmt.Errorf("%w: no GPU model %q; there are %s", shm.ErrInvalid, name, strings.Join(Names(), ", "))
	}
	m, err := make(o)
	if err != nil {
		return nil, err
	}
	m.options = o
	return m, nil
}

// plain is what most programs have in common.
type plain struct{ variable int }

func (plain) inPlace() bool                    { return false }
func (plain) prepare(*lane, *shm.Layout) error { return nil }

// finish gives every request's outputs the sizes of its inputs, where those
// vary and the model mirrors them.
func (p plain) finish(b *worker.Batch) error {
	if p.variable == 0 {
		return nil
	}
	dims := make([]int, p.variable)
	for i := range b.Len() {
		for j, d := range b.Request(i).Dims()[:p.variable] {
			dims[j] = int(d)
		}
		if err := b.SetOutputDims(i, dims...); err != nil {
			return err
		}
	}
	return nil
}

// elementwise is a signature whose outputs mirror the inputs, named as by
// the CPU's models.
func elementwise(inputs []shm.TensorSpec) shm.Signature {
	if len(inputs) == 0 {
		inputs = []shm.TensorSpec{{Name: "x", DType: shm.F32, Shape: []int{16}}}
	}
	sig := shm.Signature{Inputs: inputs}
	for _, in := range inputs {
		out := in
		if out.Name = in.Name + "_out"; in.Name == "x" {
			out.Name = "y"
		}
		sig.Outputs = append(sig.Outputs, out)
	}
	return sig
}
