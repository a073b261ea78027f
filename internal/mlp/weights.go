// SPDX-License-Identifier: Apache-2.0

package mlp

// Layers is the number of layers.
func (m *MLP) Layers() int { return len(m.layers) }

// Weights unpacks layer i as torch's nn.Linear has it: w[out][in], row after
// row, and the bias. Both are copies.
func (m *MLP) Weights(i int) (w, bias []float32) {
	l := m.layers[i]
	w = make([]float32, l.out*l.in)
	for o := range l.out {
		l.row(w[o*l.in:(o+1)*l.in], o)
	}
	return w, append([]float32(nil), l.bias[:l.out]...)
}
