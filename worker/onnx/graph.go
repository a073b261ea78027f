// SPDX-License-Identifier: Apache-2.0

package onnx

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	ort "github.com/yalue/onnxruntime_go"

	"github.com/ringbatch/ringbatch/tensor"
)

var kinds = map[ort.TensorElementDataType]tensor.DType{
	ort.TensorElementDataTypeBool:     tensor.Bool,
	ort.TensorElementDataTypeUint8:    tensor.U8,
	ort.TensorElementDataTypeInt8:     tensor.I8,
	ort.TensorElementDataTypeInt16:    tensor.I16,
	ort.TensorElementDataTypeInt32:    tensor.I32,
	ort.TensorElementDataTypeInt64:    tensor.I64,
	ort.TensorElementDataTypeFloat16:  tensor.F16,
	ort.TensorElementDataTypeBFloat16: tensor.BF16,
	ort.TensorElementDataTypeFloat:    tensor.F32,
	ort.TensorElementDataTypeDouble:   tensor.F64,
}

// node is an input or output of the graph.
type node struct {
	name string // in the graph
	kind ort.TensorElementDataType
	spec tensor.Spec
}

// shape is the shape of a number of rows.
func (n *node) shape(rows int) ort.Shape {
	s := ort.NewShape(int64(rows))
	for _, d := range n.spec.Shape {
		s = append(s, int64(d))
	}
	return s
}

func names(nodes []node) (list []string) {
	for _, n := range nodes {
		list = append(list, n.name)
	}
	return list
}

func specs(nodes []node) (list []tensor.Spec) {
	for _, n := range nodes {
		list = append(list, n.spec)
	}
	return list
}

// inputNodes reads the inputs of the graph. Every dimension but the first must have a
// size, in the graph or in dims.
func inputNodes(infos []ort.InputOutputInfo, dims map[string]int) ([]node, error) {
	used := map[string]bool{}
	var nodes []node
	var open []string
	for _, info := range infos {
		n, err := newNode("input", info)
		if err != nil {
			return nil, err
		}
		if len(info.Dimensions) == 0 {
			return nil, fmt.Errorf("%w: input %q has no dimensions, so none for the batch: make it a constant, or one number per row",
				ErrModel, n.name)
		}
		if d := info.Dimensions[0]; d >= 0 {
			return nil, fmt.Errorf("%w: input %q has a fixed batch of %d: the first dimension must be free for requests to share a batch. "+
				"Export it so, torch.onnx.export(..., dynamic_axes={%q: {0: 'batch'}, ...})", ErrModel, n.name, d, n.name)
		}
		for i, d := range info.Dimensions[1:] {
			if d < 0 {
				place := fmt.Sprintf("%s.%d", n.spec.Name, i)
				size, ok := dims[place]
				if !ok {
					open = append(open, place)
				}
				used[place] = true
				d = int64(size)
			}
			n.spec.Shape = append(n.spec.Shape, int(d))
		}
		nodes = append(nodes, n)
	}
	if len(open) > 0 {
		return nil, fmt.Errorf("%w: the graph leaves %s open: say its size where it never changes, like --dim %s=128; "+
			"sizes that vary are for the Python package's `ringbatch onnx`", ErrModel, strings.Join(open, ", "), open[0])
	}
	for _, name := range slices.Sorted(maps.Keys(dims)) {
		if !used[name] {
			return nil, fmt.Errorf("%w: --dim %s: the graph has no such open dimension; they are named by input and place, like tokens.0",
				ErrModel, name)
		}
		if dims[name] < 1 {
			return nil, fmt.Errorf("%w: --dim %s=%d: want a size of at least 1", ErrModel, name, dims[name])
		}
	}
	return nodes, nil
}

// pick returns the outputs with these names, in their order; all without names.
func pick(outputs []ort.InputOutputInfo, wanted []string) ([]ort.InputOutputInfo, error) {
	if len(wanted) == 0 {
		return outputs, nil
	}
	var picked []ort.InputOutputInfo
	for i, name := range wanted {
		k := slices.IndexFunc(outputs, func(o ort.InputOutputInfo) bool { return name == o.Name || name == publicName(o.Name) })
		if k < 0 || slices.Contains(wanted[:i], name) {
			var all []string
			for _, o := range outputs {
				all = append(all, o.Name)
			}
			return nil, fmt.Errorf("%w: --output %s: want different outputs of the graph; it has %s", ErrModel, name, strings.Join(all, ", "))
		}
		picked = append(picked, outputs[k])
	}
	return picked, nil
}

func newNode(side string, info ort.InputOutputInfo) (node, error) {
	kind, ok := kinds[info.DataType]
	if info.OrtValueType != ort.ONNXTypeTensor || !ok {
		advice := ""
		if side == "output" {
			advice = ". Name the outputs to serve without it, --output NAME"
		}
		return node{}, fmt.Errorf("%w: %s %q is a kind of value that no ring holds: %s%s", ErrModel, side, info.Name, info.String(), advice)
	}
	spec := tensor.Spec{Name: publicName(info.Name), DType: kind, Shape: []int{}}
	return node{name: info.Name, kind: info.DataType, spec: spec}, nil
}

// publicName replaces characters that names of tensors in the ring must not have.
func publicName(name string) string {
	return strings.Map(func(r rune) rune {
		if strings.ContainsRune(":[],", r) || r <= ' ' {
			return '_'
		}
		return r
	}, name)
}
