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
	"github.com/ringbatch/ringbatch/internal/npy"
	"github.com/ringbatch/ringbatch/shm"
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
	rows := inputs[0].(shm.Tensor).Rows()
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
func readInputs(sig *shm.Signature, numbers, files []string, shape []int) ([]any, error) {
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
		t := shm.Tensor{Name: spec.Name, DType: spec.DType}
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
		return nil, fmt.Errorf("%w: no input %q; the model has %s", shm.ErrInvalid, name, sig)
	}
	return tensors, nil
}

// shapeOf is the shape of so many bytes, rows first. given are the sizes of a
// row, if the user told them.
func shapeOf(spec *shm.TensorSpec, bytes int, given []int) ([]int, error) {
	row, hint := spec.Shape, ""
	switch {
	case len(given) > 0:
		// Checked before its sizes are multiplied. It has no data yet.
		t := shm.Tensor{DType: spec.DType, Shape: append([]int{1}, given...)}
		if _, _, err := shm.CheckInput(spec, &t, nil); !errors.Is(err, shm.ErrSize) {
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
	if bytes == 0 || bytes%size != 0 {
		return nil, fmt.Errorf("%w: a row of %s takes %d values, got %d%s", shm.ErrSize, spec, size/spec.DType.Size(), bytes/spec.DType.Size(), hint)
	}
	return append([]int{bytes / size}, row...), nil
}

const maxInputFile = 4 << 30

// readInput reads a .npy file, known by how it begins, or raw bytes: then the
// tensor has no shape yet.
func readInput(spec *shm.TensorSpec, file string) (shm.Tensor, error) {
	f := os.Stdin
	if file != "-" {
		var err error
		if f, err = os.Open(file); err != nil {
			return shm.Tensor{}, err
		}
		defer f.Close()
	}
	r := bufio.NewReader(f)
	if start, _ := r.Peek(len(npy.Magic)); string(start) == npy.Magic {
		return readNPY(spec, file, r)
	}
	if filepath.Ext(file) == ".npy" {
		return shm.Tensor{}, fmt.Errorf("%s: %w", file, npy.ErrFormat)
	}
	data, err := io.ReadAll(io.LimitReader(r, maxInputFile))
	return shm.Tensor{Name: spec.Name, DType: spec.DType, Data: data}, err
}

// readNPY accepts the shape with or without the row dimension.
func readNPY(spec *shm.TensorSpec, file string, r io.Reader) (shm.Tensor, error) {
	a, err := npy.Read(r, maxInputFile)
	if err != nil {
		return shm.Tensor{}, fmt.Errorf("%s: %w", file, err)
	}
	dt, err := shm.ParseDType(a.DType)
	if err != nil {
		return shm.Tensor{}, err
	}
	if spec.DType == shm.BF16 && dt == shm.I16 { // NumPy has no bfloat16
		dt = shm.BF16
	}
	shape := a.Shape
	if len(shape) == len(spec.Shape) {
		shape = append([]int{1}, shape...)
	}
	return shm.Tensor{Name: spec.Name, DType: dt, Shape: shape, Data: a.Data}, nil
}

// encode writes numbers as elements of a dtype.
func encode(d shm.DType, numbers []string) ([]byte, error) {
	var out []byte
	le := binary.LittleEndian
	for _, text := range numbers {
		bad := func(err error) ([]byte, error) {
			return nil, fmt.Errorf("%w: %q is not a %s: %v", shm.ErrDType, text, d, err)
		}
		switch d {
		case shm.F32, shm.F64:
			v, err := strconv.ParseFloat(text, d.Size()*8)
			if err != nil {
				return bad(err)
			}
			if d == shm.F32 {
				out = le.AppendUint32(out, math.Float32bits(float32(v)))
			} else {
				out = le.AppendUint64(out, math.Float64bits(v))
			}
		case shm.U8:
			v, err := strconv.ParseUint(text, 10, 8)
			if err != nil {
				return bad(err)
			}
			out = append(out, byte(v))
		case shm.I8, shm.I16, shm.I32, shm.I64:
			v, err := strconv.ParseInt(text, 10, d.Size()*8)
			if err != nil {
				return bad(err)
			}
			out = append(out, le.AppendUint64(nil, uint64(v))[:d.Size()]...)
		case shm.Bool:
			v, err := strconv.ParseBool(text)
			if err != nil {
				return bad(err)
			}
			out = append(out, map[bool]byte{true: 1}[v])
		case shm.F16, shm.BF16:
			v, err := strconv.ParseFloat(text, 32)
			if err != nil {
				return bad(err)
			}
			bits, err := toHalf(d, float32(v))
			if err != nil {
				return bad(err)
			}
			out = le.AppendUint16(out, bits)
		}
	}
	return out, nil
}

// outputFiles tells which outputs go where, before anything is sent.
func outputFiles(sig *shm.Signature, outs []string) (map[string]string, error) {
	files := map[string]string{}
	for _, text := range outs {
		name, file, ok := strings.Cut(text, "=")
		if !ok {
			return nil, fmt.Errorf("%w: --out %s: want NAME=FILE.npy", errUsage, text)
		}
		if !slices.ContainsFunc(sig.Outputs, func(t shm.TensorSpec) bool { return t.Name == name }) {
			return nil, fmt.Errorf("%w: no output %q; the model has %s", shm.ErrInvalid, name, sig)
		}
		files[name] = file
	}
	return files, nil
}

func writeOutputs(sig *shm.Signature, r client.Request, files map[string]string, asJSON bool) error {
	result := map[string]any{}
	for _, spec := range sig.Outputs {
		view, err := r.Output(spec.Name)
		if err != nil {
			return err
		}
		t := shm.Tensor{Name: view.Name, DType: view.DType, Shape: view.Shape, Data: make([]byte, view.Rows()*view.RowBytes())}
		if err := shm.Copy(t, view); err != nil {
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

func writeNPY(file string, t shm.Tensor) error {
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	defer f.Close()
	dt := t.DType
	if dt == shm.BF16 {
		dt = shm.I16
	}
	if err := npy.Write(f, npy.Array{DType: dt.String(), Shape: t.Shape, Data: t.Data}); err != nil {
		return err
	}
	return f.Close()
}

// decode gives the elements as something that prints and encodes well.
func decode(t shm.Tensor) any {
	switch t.DType {
	case shm.F32:
		v, _ := shm.As[float32](t)
		return jsonFloats[float32](v)
	case shm.F64:
		v, _ := shm.As[float64](t)
		return jsonFloats[float64](v)
	case shm.I32:
		v, _ := shm.As[int32](t)
		return v
	case shm.I64:
		v, _ := shm.As[int64](t)
		return v
	case shm.I16:
		v, _ := shm.As[int16](t)
		return v
	case shm.I8:
		v, _ := shm.As[int8](t)
		return v
	case shm.Bool:
		v, _ := shm.As[bool](t)
		return v
	case shm.F16, shm.BF16:
		out := make(jsonFloats[float32], len(t.Data)/2)
		for i := range out {
			out[i] = fromHalf(t.DType, binary.LittleEndian.Uint16(t.Data[2*i:]))
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
