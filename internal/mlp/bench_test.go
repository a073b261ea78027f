// SPDX-License-Identifier: Apache-2.0

package mlp

import (
	"fmt"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
)

// BenchmarkForward is the default model at growing batches, on one core:
//
//	go test ./internal/mlp -run '^$' -bench Forward -cpu 1
func BenchmarkForward(b *testing.B) {
	for name, k := range kernels() {
		m, err := newOn(k, Default())
		must.Do(b, err)
		for _, rows := range []int{1, 8, 32} {
			b.Run(fmt.Sprintf("kernel=%s/rows=%d", name, rows), func(b *testing.B) {
				src, dst := make([]float32, rows*m.In()), make([]float32, rows*m.Out())
				for b.Loop() {
					m.Forward(dst, src, rows)
				}
				b.ReportMetric(float64(rows*b.N)/b.Elapsed().Seconds(), "items/s")
			})
		}
	}
}
