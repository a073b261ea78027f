// SPDX-License-Identifier: Apache-2.0

package broker_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client/ringbatchtest"
	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

// weightsRig plays publishers and followers that only attach.
type weightsRig struct {
	*testing.T
	broker *ringbatchtest.Broker
}

func newWeightsRig(t *testing.T, cfg broker.Config) *weightsRig {
	t.Helper()
	return &weightsRig{t, ringbatchtest.Start(t, cfg)}
}

func (r *weightsRig) soon() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	r.Cleanup(cancel)
	return ctx
}

// attach returns the connection and, unless the peer waits, the broker's answer.
func (r *weightsRig) attach(model string, peer control.WeightsPeer) (*net.UnixConn, error) {
	r.Helper()
	c, err := attach.Dial(r.soon(), r.broker.Socket())
	must.Do(r, err)
	r.Cleanup(func() { c.Close() })
	req := &control.Request{Version: control.Version, Op: control.OpWeights, Model: model, Weights: &peer}
	if peer.Wait {
		must.Do(r, control.Send(c, time.Now().Add(time.Minute), req))
		return c, nil
	}
	_, fds, err := attach.Call(r.soon(), c, req)
	control.CloseFDs(fds)
	return c, err
}

// publisher publishes, as soon as the broker has seen the follower.
func (r *weightsRig) publisher(model string) (c *net.UnixConn) {
	r.Helper()
	must.Do(r, testbed.Eventually(time.Minute, func() (err error) {
		c, err = r.attach(model, publishes("w:f32[4]"))
		return err
	}))
	return c
}

func publishes(tensors ...string) control.WeightsPeer {
	return control.WeightsPeer{Publish: true, Tensors: tensors}
}

var waits = control.WeightsPeer{Wait: true}

func (r *weightsRig) weights(want int) {
	r.Helper()
	must.Do(r, testbed.Eventually(time.Minute, func() error {
		s, err := admin.New(r.broker.Socket()).Stats(r.soon())
		if err == nil && len(s.Weights) != want {
			err = fmt.Errorf("weights of %d names, not %d", len(s.Weights), want)
		}
		return err
	}))
}

func TestWeightsGoWithTheirModelAndTheirPeers(t *testing.T) {
	sig, err := tensor.ParseSignature([]string{"x:f32[1]"}, []string{"y:f32[1]"})
	must.Do(t, err)
	r := newWeightsRig(t, broker.Config{Models: []broker.ModelConfig{{Name: "stays", Signature: sig}}, Limits: broker.Limits{MaxUserModels: 2}})
	r.publisher("stays").Close()
	for i := range 8 { // the quota is 2 names
		name := fmt.Sprint("name", i)
		f, _ := r.attach(name, waits)
		p := r.publisher(name)
		r.weights(2)
		p.Close()
		f.Close()
		r.weights(1)
	}
	end := r.broker.Serve(r.T, worker.Config{Model: "declared", Signature: sig}, nil)
	f, _ := r.attach("declared", waits)
	p := r.publisher("declared") // weights count apart from models
	f.Close()
	p.Close()
	_, err = r.attach("other", control.WeightsPeer{Publish: true, Tensors: []string{"w:f32[4]"}, Again: true})
	must.Fail(t, "a third name", err, status.ErrQuota)
	end()
	r.weights(1)
}

func TestAPublisherOfAModelThatFollowsNothingIsRefused(t *testing.T) {
	sig, err := tensor.ParseSignature([]string{"x:f32[1]"}, []string{"y:f32[1]"})
	must.Do(t, err)
	r := newWeightsRig(t, broker.Config{Models: []broker.ModelConfig{{Name: "policy", Signature: sig}}})
	_, err = r.attach("polcy", publishes("w:f32[4]"))
	must.Fail(t, "a typo", err, status.ErrUnknownModel)
	f, _ := r.attach("actor", waits)
	must.Do(t, testbed.Eventually(time.Minute, func() error {
		_, err := r.attach("acto", publishes("w:f32[4]"))
		if !errors.Is(err, status.ErrUnknownModel) {
			t.Fatal(err)
		}
		if !strings.Contains(err.Error(), `workers wait for weights of ["actor"]`) {
			return err
		}
		return f.Close()
	}))
	end := r.broker.Serve(r.T, worker.Config{Model: "policy", Signature: sig}, nil)
	_, err = r.attach("policy", publishes("w:f32[4]"))
	must.Fail(t, "workers that do not follow", err, status.ErrNoWorker)
	end()
}

func TestAWorkerThatWaitsForAVersionDoesNotKeepTheTensors(t *testing.T) {
	r := newWeightsRig(t, broker.Config{})
	f, _ := r.attach("m", waits)
	r.publisher("m").Close() // nothing was published
	must.Do(t, testbed.Eventually(time.Minute, func() error {
		_, err := r.attach("m", publishes("other:f32[8]"))
		if errors.Is(err, status.ErrSignatureMismatch) {
			t.Fatal(err)
		}
		return err // Busy, until the broker has seen the end of the one before
	}))
	must.Do(t, f.SetReadDeadline(time.Now().Add(time.Minute)))
	var err error
	for buffer := make([]byte, 4096); err == nil; _, err = f.Read(buffer) {
	}
	if !errors.Is(err, io.EOF) {
		t.Error("the waiting worker was not sent on:", err)
	}
}
