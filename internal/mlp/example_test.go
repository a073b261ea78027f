// SPDX-License-Identifier: Apache-2.0

package mlp_test

import (
	"fmt"

	"github.com/ringbatch/ringbatch/internal/mlp"
)

// A worker reads a batch from wherever its rows lie and writes each answer back
// to its own place.
func ExampleMLP_ForwardRows() {
	m, err := mlp.New(mlp.Config{Sizes: []int{3, 64, 2}, Seed: 1})
	if err != nil {
		fmt.Println(err)
		return
	}
	slots := [][]float32{{1, 2, 3, 0, 0}, {4, 5, 6, 0, 0}} // 3 inputs, room for 2 outputs
	inputs := [][]float32{slots[1][:3], slots[0][:3]}
	outputs := [][]float32{slots[1][3:], slots[0][3:]}
	m.ForwardRows(outputs, inputs)

	alone := make([]float32, 2)
	m.Forward(alone, slots[0], 1)
	fmt.Println("same bits alone and in a batch:", alone[0] == slots[0][3] && alone[1] == slots[0][4])
	// Output: same bits alone and in a batch: true
}
