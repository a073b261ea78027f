// SPDX-License-Identifier: Apache-2.0

package mlp

import "math"

// Seeded weights. Each is a hash of (seed, layer, index), not the next value of a
// stream: the model doesn't depend on the kernel's packing, and one weight costs
// about a nanosecond.
//
// He's uniform bound √(6/in) keeps the variance of activations the same from one
// ReLU layer to the next, however deep the model.

const golden = 0x9e3779b97f4a7c15

// mix is the finalizer of SplitMix64.
func mix(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// uniform maps a hash to [-bound, bound), using 24 bits: all a float32 can hold.
func uniform(h uint64, bound float32) float32 {
	return (float32(int32(uint32(h>>32))>>8) * (1.0 / (1 << 23))) * bound
}

func (l *layer) seed(seed int64, index int) {
	key := mix(uint64(seed)*golden + uint64(index) + 1)
	bound := float32(math.Sqrt(6 / float64(l.in)))
	l.fill(func(row []float32, o int) []float32 {
		at := key + uint64(o)*uint64(l.in)*golden
		for k := range row {
			at += golden
			row[k] = uniform(mix(at), bound)
		}
		return row
	})
	key = mix(key)
	for o := range l.out {
		l.bias[o] = uniform(mix(key+uint64(o)*golden), 0.1)
	}
}
