// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/codec"
	"github.com/ringbatch/ringbatch/internal/npy"
	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

func runInfer(ctx context.Context, args []string) error {
	f := flags("infer", " MODEL [NUMBER…|TEXT…]",
		`Send one request and print the outputs. Inputs are numbers or texts on the command line (for a model with
one input), or one --in NAME=FILE per input: a .npy file, raw little-endian bytes, or one text.`,
		`  ringbatch infer affine 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16
  ringbatch infer shout "hello world"
  ringbatch infer resnet50 --in x=image.npy --out y=scores.npy --timeout 2s
`)
	socket := socketFlag(f)
	ins := f.StringArray("in", nil, "input file, `NAME=FILE` (repeatable)")
	outs := f.StringArray("out", nil, "write an output to a file, `NAME=FILE.npy`, instead of printing it (repeatable)")
	shape := f.IntSlice("shape", nil, "sizes of a row's dimensions, `N,N…`, for numbers or raw bytes of an input with variable ones")
	timeout := f.Duration("timeout", 10*time.Second, "give up after")
	priority := f.Int("priority", -1, "priority level; -1: the model's default")
	asJSON := f.Bool("json", false, "print JSON")
	timing := f.Bool("timing", false, "print where the time went")
	if err := parse(f, numbersLast(f.FlagSet, args), 1, -1); err != nil {
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
	if rows > 1 && rows <= c.Model().MaxBatchSize { // now the number of rows is known: dial again with a larger window
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
		fmt.Fprintf(os.Stderr, "claim %v, write %v, queue %v, dispatch %v, compute %v, wake %v, total %v\n",
			t.Claim, t.Write, t.Queue, t.Dispatch, t.Compute, t.Wake,
			t.Claim+t.Write+t.Queue+t.Dispatch+t.Compute+t.Wake)
	}
	return nil
}

// send runs one request. The caller reads its outputs and releases it.
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
	for name := range byName {
		if !slices.ContainsFunc(sig.Inputs, func(t tensor.Spec) bool { return t.Name == name }) {
			return nil, fmt.Errorf("no input %q; the model is %s", name, sig)
		}
	}
	if len(numbers) > 0 && (len(sig.Inputs) != 1 || len(files) > 0) {
		return nil, fmt.Errorf("%w: numbers and texts are for models with one input; this one is %s", errUsage, sig)
	}
	var tensors []any
	for i := range sig.Inputs {
		spec := &sig.Inputs[i]
		t := tensor.Tensor{Name: spec.Name, DType: spec.DType}
		var err error
		switch file, ok := byName[spec.Name]; {
		case ok:
			t, err = readInput(spec, file)
		case len(numbers) > 0 && spec.DType == tensor.Str:
			t, err = spec.OfTexts(numbers)
		case len(numbers) > 0:
			if t.Data, err = encode(spec.DType, numbers); err != nil {
				err = fmt.Errorf("input %q: %w", spec.Name, err)
			}
		default:
			err = fmt.Errorf("%w: no input for %s", errUsage, spec)
		}
		if err != nil {
			return nil, err
		}
		if t.Shape == nil {
			if t.Shape, err = shapeOf(spec, len(t.Data), shape); err != nil {
				return nil, err
			}
		}
		tensors = append(tensors, t)
	}
	return tensors, nil
}

// shapeOf is the shape of a number of bytes, rows first. given is --shape, the sizes of a
// row.
func shapeOf(spec *tensor.Spec, bytes int, given []int) ([]int, error) {
	row, hint := spec.Shape, ""
	switch {
	case len(given) > 0:
		// Check the sizes before they are multiplied. The tensor has no data yet.
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
		return nil, fmt.Errorf("%w: a row of %s takes %d values, got %d%s", status.ErrSize, spec, size/spec.DType.Size(),
			bytes/spec.DType.Size(), hint)
	}
	return append([]int{bytes / size}, row...), nil
}

const maxInputFile = 4 << 30

// readInput reads a .npy file, recognized by its first bytes, or raw bytes. A tensor of raw
// bytes has no shape yet.
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
	if spec.DType == tensor.Str {
		data, err := io.ReadAll(io.LimitReader(r, maxInputFile))
		if err != nil {
			return tensor.Tensor{}, err
		}
		return spec.OfTexts([]string{string(data)})
	}
	if start, _ := r.Peek(len(npy.Magic)); string(start) == npy.Magic {
		t, err := codec.ReadNPY(r, spec, maxInputFile)
		if err != nil {
			return t, fmt.Errorf("%s: %w", file, err)
		}
		return t, nil
	}
	if filepath.Ext(file) == ".npy" {
		return tensor.Tensor{}, fmt.Errorf("%s: %w", file, npy.ErrFormat)
	}
	data, err := io.ReadAll(io.LimitReader(r, maxInputFile))
	return tensor.Tensor{Name: spec.Name, DType: spec.DType, Data: data}, err
}

// encode writes typed numbers as elements of a dtype.
func encode(d tensor.DType, numbers []string) ([]byte, error) {
	size := d.Size()
	out := make([]byte, size*len(numbers))
	for i, text := range numbers {
		if err := codec.Put(out[i*size:], d, []byte(text)); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// outputFiles maps outputs to files. It checks both before anything is sent.
func outputFiles(sig *tensor.Signature, outs []string) (map[string]string, error) {
	files := map[string]string{}
	for _, text := range outs {
		name, file, ok := strings.Cut(text, "=")
		if !ok {
			return nil, fmt.Errorf("%w: --out %s: want NAME=FILE.npy", errUsage, text)
		}
		if !slices.ContainsFunc(sig.Outputs, func(t tensor.Spec) bool { return t.Name == name }) {
			return nil, fmt.Errorf("no output %q; the model is %s", name, sig)
		}
		if slices.ContainsFunc(sig.Outputs, func(t tensor.Spec) bool { return t.Name == name && t.DType == tensor.Str }) {
			return nil, fmt.Errorf("%w: --out %s: an .npy file has no str; --json prints it", errUsage, text)
		}
		if err := progress.CanWrite(file); err != nil {
			return nil, fmt.Errorf("--out: %w", err)
		}
		files[name] = file
	}
	return files, nil
}

// printed is an output in --json.
type printed struct {
	Data  json.RawMessage `json:"data"`
	DType string          `json:"dtype"`
	Shape []int           `json:"shape"`
}

func writeOutputs(sig *tensor.Signature, r client.Request, files map[string]string, asJSON bool) error {
	result := map[string]printed{}
	for _, spec := range sig.Outputs {
		view, err := r.Output(spec.Name)
		if err != nil {
			return err
		}
		t := tensor.Tensor{Name: view.Name, DType: view.DType, Shape: view.Shape, Data: make([]byte, view.Rows()*view.RowBytes())}
		if err := tensor.Copy(t, view); err != nil {
			return err
		}
		if t.DType == tensor.Str {
			if err := printTexts(t, &spec, result, asJSON); err != nil {
				return err
			}
			continue
		}
		switch file, ok := files[spec.Name]; {
		case ok:
			if err := writeFile(file, func(w io.Writer) error { return codec.WriteNPY(w, t) }); err != nil {
				return err
			}
		case asJSON:
			result[spec.Name] = printed{jsonList(t), t.DType.String(), t.Shape}
		default:
			if _, err := fmt.Printf("%s %s%v\n%s\n", t.Name, t.DType, t.Shape, brief(t)); err != nil {
				return err
			}
		}
	}
	if asJSON {
		return json.NewEncoder(os.Stdout).Encode(result)
	}
	return nil
}

func printTexts(t tensor.Tensor, spec *tensor.Spec, result map[string]printed, asJSON bool) error {
	texts, err := tensor.Texts(t)
	if err != nil {
		return err
	}
	shape := append([]int{t.Rows()}, spec.Shape[:len(spec.Shape)-1]...)
	if asJSON {
		data, err := json.Marshal(texts)
		result[t.Name] = printed{data, t.DType.String(), shape}
		return err
	}
	_, err = fmt.Printf("%s %s%v\n%s\n", t.Name, t.DType, shape, strings.Join(texts, "\n"))
	return err
}

func jsonList(t tensor.Tensor) json.RawMessage {
	return append(codec.AppendJSON([]byte{'['}, t.DType, t.Data, false), ']')
}

// brief shortens long outputs for people; --json and --out have all values.
func brief(t tensor.Tensor) string {
	const most = 64
	size := t.DType.Size()
	n := len(t.Data) / size
	var b []byte
	for i := range min(n, most) {
		if i > 0 {
			b = append(b, ' ')
		}
		b = codec.Append(b, t.DType, t.Data[i*size:])
	}
	if n > most {
		b = fmt.Appendf(b, " … (%d values; --json or --out for all)", n)
	}
	return string(b)
}

// numbersLast puts the flags and their values first, then "--" and all other arguments:
// pflag would read the number -1 as a flag.
func numbersLast(f *pflag.FlagSet, args []string) []string {
	var flags, rest []string
	for i := 0; i < len(args); i++ {
		arg := args[i]
		if arg == "--" {
			rest = append(rest, args[i+1:]...)
			break
		}
		_, err := strconv.ParseFloat(arg, 64)
		if !strings.HasPrefix(arg, "-") || err == nil || errors.Is(err, strconv.ErrRange) {
			rest = append(rest, arg)
			continue
		}
		flags = append(flags, arg)
		if known := f.Lookup(strings.TrimPrefix(arg, "--")); known != nil && known.NoOptDefVal == "" {
			if i+1 == len(args) {
				return flags // pflag says that its value is missing
			}
			i++
			flags = append(flags, args[i])
		}
	}
	return append(append(flags, "--"), rest...)
}
