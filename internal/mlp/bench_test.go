// SPDX-License-Identifier: Apache-2.0

package mlp

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"
)

// BenchmarkForward is the default model at growing batches, on one core:
//
//	go test ./internal/mlp -run '^$' -bench 'Forward|StreamRead' -cpu 1
//
// GB/s counts each weight once per call, as memory sees it.
func BenchmarkForward(b *testing.B) {
	for _, kernel := range Kernels() {
		m, err := New(Default(), WithKernel(kernel))
		if err != nil {
			b.Fatal(err)
		}
		for _, rows := range []int{1, 2, 4, 8, 14, 16, 24, 32, 64, 128, 256} {
			if kernel == "portable" && rows > 32 {
				continue
			}
			b.Run(fmt.Sprintf("kernel=%s/rows=%d", kernel, rows), func(b *testing.B) { benchRows(b, m, rows) })
		}
	}
}

// BenchmarkBatchingPays takes turns between 1 row and 32, so that a busy machine
// slows both, and reports how many times the items per second 32 gives.
func BenchmarkBatchingPays(b *testing.B) {
	m, err := New(Default())
	if err != nil {
		b.Fatal(err)
	}
	src, dst := make([]float32, 32*m.In()), make([]float32, 32*m.Out())
	var one, many time.Duration
	for b.Loop() {
		start := time.Now()
		m.Forward(dst, src, 1)
		mid := time.Now()
		m.Forward(dst, src, 32)
		one, many = one+mid.Sub(start), many+time.Since(mid)
	}
	b.ReportMetric(32*one.Seconds()/many.Seconds(), "times")
}

func benchRows(b *testing.B, m *MLP, rows int) {
	cfg := Config{Sizes: m.Sizes()}
	src, dst := make([]float32, rows*m.In()), make([]float32, rows*m.Out())
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range src {
		src[i] = float32(rng.NormFloat64())
	}
	m.Forward(dst, src, rows)
	b.ReportAllocs()
	for b.Loop() {
		m.Forward(dst, src, rows)
	}
	s := b.Elapsed().Seconds() / float64(b.N)
	b.ReportMetric(float64(rows)/s, "items/s")
	b.ReportMetric(float64(rows)*float64(cfg.Flops())/s/1e9, "GFLOP/s")
	b.ReportMetric(float64(cfg.WeightBytes())/s/1e9, "GB/s")
}

// BenchmarkStreamRead is the yardstick for one row: how fast a core reads that
// much memory when it does nothing else (the runtime's vectorised search, which
// leaves prefetching to the CPU; so one row may well be faster).
func BenchmarkStreamRead(b *testing.B) {
	s := alignedFloats(int(Default().WeightBytes() / 4))
	adviseHugePages(s)
	mem := floatBytes(s)
	for i := range mem {
		mem[i] = 1
	}
	for b.Loop() {
		if bytes.IndexByte(mem, 0) >= 0 {
			b.Fatal("found what is not there")
		}
	}
	b.ReportMetric(float64(len(mem))*float64(b.N)/b.Elapsed().Seconds()/1e9, "GB/s")
}

func BenchmarkNewDefault(b *testing.B) {
	for b.Loop() {
		if _, err := New(Default()); err != nil {
			b.Fatal(err)
		}
	}
}
