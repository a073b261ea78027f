// SPDX-License-Identifier: Apache-2.0

package mlp

import "sync"

// crew is the helpers of a model with more than one thread. Each layer's panels
// are cut into equal ranges, one per thread; a layer starts when the one before
// is finished everywhere. Ranges don't overlap and weights are read-only, so
// the two channels' happens-before is all the synchronisation there is.
type crew struct {
	start []chan struct{} // one per helper; a value = "m.job is yours", closed = "go home"
	done  sync.WaitGroup
	once  sync.Once
}

func newCrew(m *MLP, threads int) *crew {
	if threads <= 1 {
		return nil
	}
	c := &crew{start: make([]chan struct{}, threads-1)}
	for i := range c.start {
		c.start[i] = make(chan struct{}, 1)
		go c.help(m, i+1)
	}
	return c
}

func (c *crew) help(m *MLP, part int) {
	var t tile
	for range c.start[part-1] {
		m.runPart(&t, part)
		// Keep no pointer to a caller's rows between calls.
		t = tile{}
		c.done.Done()
	}
}

func (c *crew) stop() {
	c.once.Do(func() {
		for _, ch := range c.start {
			close(ch)
		}
	})
}

// runJob runs m.job to its end, on all threads.
func (m *MLP) runJob() {
	if m.crew == nil {
		m.runPart(&m.tile, 0)
		return
	}
	m.crew.done.Add(len(m.crew.start))
	for _, ch := range m.crew.start {
		ch <- struct{}{}
	}
	m.runPart(&m.tile, 0)
	m.crew.done.Wait()
}

func (m *MLP) runPart(t *tile, part int) {
	n, panels := m.Threads(), m.job.layer.nPad/m.job.layer.nr
	m.kernel.run(t, &m.job, m.stride, panels*part/n, panels*(part+1)/n)
}
