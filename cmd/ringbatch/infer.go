package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/half"
	"github.com/ringbatch/ringbatch/internal/npy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

func runInfer(ctx context.Context, args []string) error {
	f := flags("infer", " MODEL [NUMBER…]", "Send one request and print the outputs. Inputs are numbers on the command line (for a model\nwith one input), or one --in NAME=FILE per input: a .npy file, or raw little-endian bytes.",
		`  ringbatch infer affine 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16
  ringbatch infer resnet50 --in x=image.npy --out y=scores.npy --timeout 2s
`)
	socket := socketFlag(f)
	ins := f.StringArray("in", nil, "input file, NAME=FILE (repeatable)")
	outs := f.StringArray("out", nil, "write an output to NAME=FILE.npy instead of printing it (repeatable)")
	shape := f.IntSlice("shape", nil, "sizes of a row's dimensions, for numbers or raw bytes of an input with variable ones")
	timeout := f.Duration("timeout", 10*time.Second, "give up after")
	priority := f.Int("priority", -1, "priority level (default: the model's)")
	asJSON := f.Bool("json", false, "print JSON")
	timing := f.Bool("timing", false, "print where the time went")
	if err := parse(f, numbersLast(f, args), 1, -1); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, *timeout)
	defer cancel()
	options := []client.Option{client.WithSocket(*socket), client.WithName("ringbatch infer")}
	if *timing {
		options = append(options, client.WithTiming())
	}
	c, err := client.Dial(ctx, f.Arg(0), append(options, client.WithWindow(1))...)
	if err != nil {
		return err
	}
	defer c.Close()
	sig := c.Model().Signature
	inputs, err := readInputs(&sig, f.Args()[1:], *ins, *shape)
	if err != nil {
		return err
	}
	files, err := outputFiles(&sig, *outs)
	if err != nil {
		return err
	}
	rows := inputs[0].(tensor.Tensor).Rows()
	if rows > 1 && rows <= c.Model().MaxBatchSize { // how many rows there are only the signature tells: a second, larger window
		c.Close()
		if c, err = client.Dial(ctx, f.Arg(0), append(options, client.WithWindow(rows))...); err != nil {
			return err
		}
		defer c.Close()
	}
	r, err := send(ctx, c, inputs, *priority)
	if err != nil {
		return err
	}
	defer r.Release()
	if err := writeOutputs(&sig, r, files, *asJSON); err != nil {
		return err
	}
	if *timing {
		t, _ := r.Timing()
		fmt.Fprintf(os.Stderr, "claim %v, write %v, queue %v, dispatch %v, compute %v, wake %v, total %v\n", t.Claim, t.Write, t.Queue, t.Dispatch, t.Compute, t.Wake, t.Total())
	}
	return nil
}

// send runs one request and leaves its outputs to be read and released.
func send(ctx context.Context, c *client.Client, inputs []any, priority int) (client.Request, error) {
	r, err := c.Fill(ctx, inputs...)
	if err != nil {
		return r, err
	}
	if priority >= 0 {
		err = r.SetPriority(priority)
	}
	if err == nil {
		err = r.Commit(ctx)
	}
	if err == nil {
		err = r.Wait(ctx)
	}
	if err != nil {
		_ = r.Release()
	}
	return r, err
}

// readInputs makes a tensor for every input of the signature.
func readInputs(sig *tensor.Signature, numbers, files []string, shape []int) ([]any, error) {
	byName := map[string]string{}
	for _, text := range files {
		name, file, ok := strings.Cut(text, "=")
		if !ok {
			return nil, fmt.Errorf("%w: --in %s: want NAME=FILE", errUsage, text)
		}
		byName[name] = file
	}
	if len(numbers) > 0 && (len(sig.Inputs) != 1 || len(files) > 0) {
		return nil, fmt.Errorf("%w: numbers are for models with one input; this one is %s", errUsage, sig)
	}
	var tensors []any
	for i := range sig.Inputs {
		spec := &sig.Inputs[i]
		t := tensor.Tensor{Name: spec.Name, DType: spec.DType}
		var err error
		switch file, ok := byName[spec.Name]; {
		case ok:
			t, err = readInput(spec, file)
		case len(numbers) > 0:
			t.Data, err = encode(spec.DType, numbers)
		default:
			err = fmt.Errorf("%w: no input for %s", errUsage, spec)
		}
		if err != nil {
			return nil, err
		}
		delete(byName, spec.Name)
		if t.Shape == nil {
			if t.Shape, err = shapeOf(spec, len(t.Data), shape); err != nil {
				return nil, err
			}
		}
		tensors = append(tensors, t)
	}
	for name := range byName {
		return nil, fmt.Errorf("%w: no input %q; the model has %s", status.ErrInvalid, name, sig)
	}
	return tensors, nil
}

// shapeOf is the shape of so many bytes, rows first. given are the sizes of a
// row, if the user told them.
func shapeOf(spec *tensor.Spec, bytes int, given []int) ([]int, error) {
	row, hint := spec.Shape, ""
	switch {
	case len(given) > 0:
		// Checked before its sizes are multiplied. It has no data yet.
		t := tensor.Tensor{DType: spec.DType, Shape: append([]int{1}, given...)}
		if _, _, err := tensor.CheckInput(spec, &t, nil); err != nil && !errors.Is(err, status.ErrSize) {
			return nil, err
		}
		row = given
	case len(spec.Variable) > 0:
		hint = "; --shape tells the sizes of a smaller one"
	}
	size := spec.DType.Size()
	for _, d := range row {
		size *= d
	}
	if size == 0 && bytes == 0 {
		return append([]int{1}, row...), nil
	}
	if bytes == 0 || size == 0 || bytes%size != 0 {
		return nil, fmt.Errorf("%w: a row of %s takes %d values, got %d%s", status.ErrSize, spec, size/spec.DType.Size(), bytes/spec.DType.Size(), hint)
	}
	return append([]int{bytes / size}, row...), nil
}

const maxInputFile = 4 << 30

// readInput reads a .npy file, known by how it begins, or raw bytes: then the
// tensor has no shape yet.
func readInput(spec *tensor.Spec, file string) (tensor.Tensor, error) {
	f := os.Stdin
	if file != "-" {
		var err error
		if f, err = os.Open(file); err != nil {
			return tensor.Tensor{}, err
		}
		defer f.Close()
	}
	r := bufio.NewReader(f)
	if start, _ := r.Peek(len(npy.Magic)); string(start) == npy.Magic {
		return readNPY(spec, file, r)
	}
	if filepath.Ext(file) == ".npy" {
		return tensor.Tensor{}, fmt.Errorf("%s: %w", file, npy.ErrFormat)
	}
	data, err := io.ReadAll(io.LimitReader(r, maxInputFile))
	return tensor.Tensor{Name: spec.Name, DType: spec.DType, Data: data}, err
}

// readNPY accepts the shape with or without the row dimension.
func readNPY(spec *tensor.Spec, file string, r io.Reader) (tensor.Tensor, error) {
	a, err := npy.Read(r, maxInputFile)
	if err != nil {
		return tensor.Tensor{}, fmt.Errorf("%s: %w", file, err)
	}
	dt, err := tensor.ParseDType(a.DType)
	if err != nil {
		return tensor.Tensor{}, err
	}
	if spec.DType == tensor.BF16 && dt == tensor.I16 { // NumPy has no bfloat16
		dt = tensor.BF16
	}
	shape := a.Shape
	if len(shape) == len(spec.Shape) {
		shape = append([]int{1}, shape...)
	}
	return tensor.Tensor{Name: spec.Name, DType: dt, Shape: shape, Data: a.Data}, nil
}

// encode writes numbers as elements of a dtype.
func encode(d tensor.DType, numbers []string) ([]byte, error) {
	var out []byte
	le := binary.LittleEndian
	for _, text := range numbers {
		bad := func(err error) ([]byte, error) {
			return nil, fmt.Errorf("%w: %q is not a %s: %v", status.ErrDType, text, d, err)
		}
		switch d {
		case tensor.F32, tensor.F64:
			v, err := strconv.ParseFloat(text, d.Size()*8)
			if err != nil {
				return bad(err)
			}
			if d == tensor.F32 {
				out = le.AppendUint32(out, math.Float32bits(float32(v)))
			} else {
				out = le.AppendUint64(out, math.Float64bits(v))
			}
		case tensor.U8:
			v, err := strconv.ParseUint(text, 10, 8)
			if err != nil {
				return bad(err)
			}
			out = append(out, byte(v))
		case tensor.I8, tensor.I16, tensor.I32, tensor.I64:
			v, err := strconv.ParseInt(text, 10, d.Size()*8)
			if err != nil {
				return bad(err)
			}
			out = append(out, le.AppendUint64(nil, uint64(v))[:d.Size()]...)
		case tensor.Bool:
			v, err := strconv.ParseBool(text)
			if err != nil {
				return bad(err)
			}
			out = append(out, map[bool]byte{true: 1}[v])
		case tensor.F16, tensor.BF16:
			v, err := strconv.ParseFloat(text, 32)
			if err != nil {
				return bad(err)
			}
			bits, err := half.Bits(d, float32(v))
			if err != nil {
				return bad(err)
			}
			out = le.AppendUint16(out, bits)
		}
	}
	return out, nil
}

// outputFiles tells which outputs go where, before anything is sent.
func outputFiles(sig *tensor.Signature, outs []string) (map[string]string, error) {
	files := map[string]string{}
	for _, text := range outs {
		name, file, ok := strings.Cut(text, "=")
		if !ok {
			return nil, fmt.Errorf("%w: --out %s: want NAME=FILE.npy", errUsage, text)
		}
		if !slices.ContainsFunc(sig.Outputs, func(t tensor.Spec) bool { return t.Name == name }) {
			return nil, fmt.Errorf("%w: no output %q; the model has %s", status.ErrInvalid, name, sig)
		}
		files[name] = file
	}
	return files, nil
}

func writeOutputs(sig *tensor.Signature, r client.Request, files map[string]string, asJSON bool) error {
	result := map[string]any{}
	for _, spec := range sig.Outputs {
		view, err := r.Output(spec.Name)
		if err != nil {
			return err
		}
		t := tensor.Tensor{Name: view.Name, DType: view.DType, Shape: view.Shape, Data: make([]byte, view.Rows()*view.RowBytes())}
		if err := tensor.Copy(t, view); err != nil {
			return err
		}
		if file, ok := files[spec.Name]; ok {
			if err := writeNPY(file, t); err != nil {
				return err
			}
			continue
		}
		result[spec.Name] = map[string]any{"dtype": t.DType.String(), "shape": t.Shape, "data": decode(t)}
		if !asJSON {
			fmt.Printf("%s %s%v\n%s\n", t.Name, t.DType, t.Shape, brief(decode(t)))
		}
	}
	if asJSON {
		return json.NewEncoder(os.Stdout).Encode(result)
	}
	return nil
}

func writeNPY(file string, t tensor.Tensor) error {
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	defer f.Close()
	dt := t.DType
	if dt == tensor.BF16 {
		dt = tensor.I16
	}
	if err := npy.Write(f, npy.Array{DType: dt.String(), Shape: t.Shape, Data: t.Data}); err != nil {
		return err
	}
	return f.Close()
}

// decode gives the elements as something that prints and encodes well.
func decode(t tensor.Tensor) any {
	switch t.DType {
	case tensor.F32:
		v, _ := tensor.As[float32](t)
		return jsonFloats[float32](v)
	case tensor.F64:
		v, _ := tensor.As[float64](t)
		return jsonFloats[float64](v)
	case tensor.I32:
		v, _ := tensor.As[int32](t)
		return v
	case tensor.I64:
		v, _ := tensor.As[int64](t)
		return v
	case tensor.I16:
		v, _ := tensor.As[int16](t)
		return v
	case tensor.I8:
		v, _ := tensor.As[int8](t)
		return v
	case tensor.Bool:
		v, _ := tensor.As[bool](t)
		return v
	case tensor.F16, tensor.BF16:
		out := make(jsonFloats[float32], len(t.Data)/2)
		for i := range out {
			out[i] = half.Float32(t.DType, binary.LittleEndian.Uint16(t.Data[2*i:]))
		}
		return out
	}
	out := make([]int, len(t.Data)) // u8: JSON would make base64 of bytes
	for i, b := range t.Data {
		out[i] = int(b)
	}
	return out
}

// brief cuts long outputs for people; --json and --out give all of it.
func brief(v any) string {
	s := strings.Trim(fmt.Sprint(v), "[]")
	if fields := strings.Fields(s); len(fields) > 64 {
		return strings.Join(fields[:64], " ") + fmt.Sprintf(" … (%d values; --json or --out for all)", len(fields))
	}
	return s
}
