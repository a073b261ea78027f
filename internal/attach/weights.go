// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"context"
	"fmt"
	"net"
	"time"

	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// Weights is an attached connection of a publisher or follower.
type Weights struct {
	*shm.Weights
	Follower int // its words; -1: a publisher
	conn     *net.UnixConn
}

// OpenWeights attaches a publisher of these tensors, or, without tensors, a follower.
func OpenWeights(ctx context.Context, socket string, memory shm.Memory, model, name string, tensors []tensor.Spec) (*Weights, error) {
	socket = control.SocketPath(socket)
	c, err := Dial(ctx, socket)
	if err != nil {
		return nil, err
	}
	req := &control.Request{Op: control.OpWeights, Model: model, Name: name,
		Weights: &control.WeightsPeer{Publish: len(tensors) > 0, Tensors: tensor.SpecTexts(tensors)}}
	rep, fds, err := Call(ctx, c, req)
	if err != nil {
		hangUp(c)
		return nil, err
	}
	w, err := openWeights(rep, fds, memory)
	if err != nil {
		hangUp(c)
		return nil, fmt.Errorf("weights of %s: %w", model, err)
	}
	w.conn = c
	_ = c.SetDeadline(time.Time{}) // the call's
	return w, nil
}

// openWeights owns fds.
func openWeights(rep *control.Reply, fds []int, memory shm.Memory) (*Weights, error) {
	if rep.Weights == nil || len(fds) != 1 || rep.Weights.Follower < -1 || rep.Weights.Follower >= shm.WeightFollowers {
		control.CloseFDs(fds)
		return nil, fmt.Errorf("%w: reply with %d descriptors", status.ErrProtocol, len(fds))
	}
	specs, err := tensor.ParseSpecs(rep.Weights.Tensors, nil)
	var layout *shm.WeightsLayout
	if err == nil {
		layout, err = shm.NewWeightsLayout(specs)
	}
	if err == nil && layout.DeviceSize > 0 {
		err = errNoDevice
	}
	if err != nil {
		control.CloseFDs(fds)
		return nil, err
	}
	w, err := shm.OpenWeights(memory, fds[0], layout, rep.Epoch)
	return &Weights{Weights: w, Follower: rep.Weights.Follower}, err
}

// Gone blocks until the broker hangs up, or HangUp is called.
func (w *Weights) Gone() {
	var b [1]byte
	for {
		if _, err := w.conn.Read(b[:]); err != nil {
			return
		}
	}
}

// SayGoodbye asks the broker to hang up, for at most a second: after that another peer may
// have the role.
func (w *Weights) SayGoodbye() {
	_ = w.conn.SetReadDeadline(time.Now().Add(time.Second))
	_ = w.conn.CloseWrite()
}

// HangUp ends the connection and keeps the memory.
func (w *Weights) HangUp() { hangUp(w.conn) }

// Close ends the connection and gives back the memory.
func (w *Weights) Close() {
	w.HangUp()
	w.Segment().Close()
}
