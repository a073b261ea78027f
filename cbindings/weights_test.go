// SPDX-License-Identifier: Apache-2.0

package cbindings

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
	"github.com/ringbatch/ringbatch/worker/weights"
)

// weightsBed serves the model "m", whose answer is the least and the most of its weights.
type weightsBed struct {
	bed
	broker *testbed.Local
	sig    tensor.Signature
	specs  []tensor.Spec
	client *client.Client
}

func newWeightsBed(t *testing.T, sanitizer string) *weightsBed {
	t.Helper()
	t.Parallel()
	b := &weightsBed{bed: bed{t: t, exe: sanitizedProgram(t, sanitizer, "weights", "testdata/weights.c")}}
	var err error
	b.sig, err = tensor.ParseSignature([]string{"x:u8[1]"}, []string{"least:i64[1]", "most:i64[1]"})
	must.Do(t, err)
	b.specs, err = tensor.ParseSpecs([]string{"a:i64[600]", "b.c:i64[]"}, nil)
	must.Do(t, err)
	models := []broker.ModelConfig{{Name: "m", Signature: b.sig}}
	b.broker, err = testbed.StartLocal(broker.Config{Models: models, DrainTime: time.Millisecond})
	must.Do(t, err)
	t.Cleanup(func() { must.Check(t, b.broker.Close()) })
	b.socket = b.broker.Socket()
	b.client, err = client.Dial(b.soon(), "m", client.WithSocket(b.socket))
	must.Do(t, err)
	t.Cleanup(func() { b.client.Close() })
	return b
}

func (b *weightsBed) soon() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	b.t.Cleanup(cancel)
	return ctx
}

// ask is a version and the number that its weights are filled with.
func (b *weightsBed) ask() (v shm.Version, fill int64, err error) {
	req, err := b.client.Fill(b.soon(), []uint8{1})
	if err != nil {
		return 0, 0, err
	}
	defer req.Release()
	if err = errors.Join(req.Commit(b.soon()), req.Wait(b.soon())); err != nil {
		return 0, 0, err
	}
	least, _ := req.OutputBytes(0)
	most, _ := req.OutputBytes(1)
	if !slices.Equal(least, most) {
		b.t.Errorf("torn: %d to %d", least, most)
	}
	v, err = req.Version()
	return v, int64(binary.NativeEndian.Uint64(least)), err
}

func (b *weightsBed) expect(version shm.Version, fill int64) {
	b.t.Helper()
	if v, f, err := b.ask(); err != nil || v != version || f != fill {
		b.t.Errorf("version %d with %d, %v; not version %d with %d", v, f, err, version, fill)
	}
}

// restart waits until requests are answered again, always with this version.
func (b *weightsBed) restart(version shm.Version, fill int64) {
	b.t.Helper()
	must.Do(b.t, b.broker.Stop())
	must.Do(b.t, b.broker.Start())
	must.Do(b.t, testbed.Eventually(time.Minute, func() error {
		v, f, err := b.ask()
		if err == nil && (v != version || f != fill) {
			b.t.Errorf("version %d with %d", v, f)
		}
		return err
	}))
}

func TestACWorkerFollowsAGoPublisher(t *testing.T) {
	b := newWeightsBed(t, "address")
	p, err := weights.NewPublisher(b.soon(), "m", b.specs, weights.WithSocket(b.socket))
	must.Do(t, err)
	defer p.Close()
	publish := func(fill int64) (shm.Version, error) {
		buffer, err := p.Begin(b.soon())
		must.Do(t, err)
		for k := range 2 {
			for at := buffer.Tensor(k); len(at) > 0; at = at[8:] {
				binary.NativeEndian.PutUint64(at, uint64(fill))
			}
		}
		return p.Publish(buffer)
	}
	_, err = publish(1)
	must.Do(t, err)
	b.start(nil, "worker", b.socket).until("attached")
	b.start(nil, "worker", b.socket).until("attached")
	for i := range int64(300) {
		b.expect(shm.Version(i+1), i+1)
		_, err = publish(i + 2)
		must.Do(t, err)
	}
	_, err = publish(-1)
	must.Do(t, err)
	b.expect(301, 301)
	_, err = publish(303)
	must.Fail(t, "after a version that cannot be loaded", err, status.ErrFailed)
	v, err := publish(303)
	must.Do(t, err)
	b.expect(v, 303)
	b.restart(v, 303)
	_, err = publish(304)
	must.Do(t, err)
	must.Do(t, testbed.Eventually(time.Minute, func() error {
		if v, _, err := b.ask(); err != nil || v != 304 {
			return fmt.Errorf("version %d: %w", v, err)
		}
		return nil
	}))
}

func TestACPublisherMayDieAtAnyMoment(t *testing.T) {
	b := newWeightsBed(t, "address")
	p := b.publisher()
	p.publish(1)
	f, err := weights.Follow(b.soon(), "m", func(v weights.View) error {
		if int64(binary.NativeEndian.Uint64(v.Tensor(0))) < 0 {
			return errors.New("weights below 0")
		}
		return nil
	}, weights.WithSocket(b.socket))
	must.Do(t, err)
	defer f.Close()
	leave := testbed.ServeLocal(worker.Config{Model: "m", Signature: b.sig, Socket: b.socket, Weights: f}, answerWeights)
	defer func() { must.Check(t, leave()) }()
	b.expect(1, 1)
	b.start(nil, "publisher", b.socket).until("Busy")
	for i := shm.Version(2); i < 10; i++ {
		if said := p.publish(int64(i)); said != fmt.Sprint("version ", i) {
			t.Fatal(said)
		}
		b.expect(i, int64(i))
		fmt.Fprintln(p.stdin, "half")
		p.until("half")
		p.kill()
		b.expect(i, int64(i))
		p = b.publisher()
	}
	p.publish(-1)
	b.expect(9, 9)
	if said := p.publish(11); said != `error version 10 of the weights of "m" was withdrawn: weights below 0` {
		t.Error(said)
	}
	p.publish(11)
	b.expect(11, 11)
	b.restart(11, 11)
	fmt.Fprintln(p.stdin, "check")
	p.until("OK")
	must.Do(t, testbed.Eventually(time.Minute, func() error {
		fresh, err := weights.Follow(b.soon(), "m", func(weights.View) error { return nil }, weights.WithSocket(b.socket))
		if err == nil {
			view, _ := fresh.Enter()
			if fresh.Close(); view.Version != 11 {
				return fmt.Errorf("version %d", view.Version)
			}
		}
		return err
	}))
}

// publisher starts a publisher, once the broker knows that the one before is gone.
func (b *weightsBed) publisher() (p *role) {
	b.t.Helper()
	must.Do(b.t, testbed.Eventually(time.Minute, func() error {
		p = b.start(nil, "publisher", b.socket)
		if p.lines.Scan(); p.lines.Text() != "open" {
			return errors.New(p.lines.Text())
		}
		return nil
	}))
	return p
}

// publish is the answer of a publisher to a number that all weights get.
func (r *role) publish(fill int64) string {
	fmt.Fprintln(r.stdin, fill)
	return r.until("")
}

func TestWeightsInDeviceMemory(t *testing.T) {
	b := newWeightsBed(t, "address")
	b.env = []string{stubDriver(t), "TENSORS=a:i64[600]@device:0 b.c:i64[]@device:0"}
	p := b.publisher()
	_, err := weights.Follow(b.soon(), "m", func(weights.View) error { return nil }, weights.WithSocket(b.socket))
	must.Fail(t, "a Go follower", err, status.ErrInvalid)
	p.publish(1)
	for range 2 {
		b.start(nil, "worker", b.socket).until("attached")
	}
	for i := shm.Version(2); i < 10; i++ {
		if said := p.publish(int64(i)); said != fmt.Sprint("version ", i) {
			t.Fatal(said)
		}
		b.expect(i, int64(i))
		fmt.Fprintln(p.stdin, "half")
		p.until("half")
		p.kill()
		b.expect(i, int64(i))
		p = b.publisher()
	}
	p.publish(-1)
	b.expect(9, 9)
	if said := p.publish(11); said != `error version 10 of the weights of "m" was withdrawn: weights below 0` {
		t.Error(said)
	}
	p.publish(11)
	b.restart(11, 11) // the publisher is gone: workers keep their weights
	fmt.Fprintln(p.stdin, "check")
	p.until("OK")
	must.Do(t, testbed.Eventually(time.Minute, func() error { // new memory, and the old version in it
		if said := b.start(nil, "worker", b.socket).until(""); said != "attached" {
			return errors.New(said)
		}
		return nil
	}))
	b.expect(11, 11)
	p.publish(12)
	must.Do(t, testbed.Eventually(time.Minute, func() error {
		if v, _, err := b.ask(); err != nil || v != 12 {
			return fmt.Errorf("version %d: %w", v, err)
		}
		return nil
	}))
	p.kill()
	b.env[1] = "TENSORS=a:i64[600]@device:0 b.c:i64[]"
	b.start(nil, "publisher", b.socket).until("Invalid")
	b.env[1] = "TENSORS=a:i64[600] b.c:i64[]"
	b.start(nil, "publisher", b.socket).until("SignatureMismatch")
}

func answerWeights(_ context.Context, b *worker.Batch) error {
	for row := range b.Rows() {
		least, most := worker.Row[int64](b.Output(0), row), worker.Row[int64](b.Output(1), row)
		least[0], most[0] = 1<<62, -1<<62
		for k := range 2 {
			for at := b.Weights().Tensor(k); len(at) > 0; at = at[8:] {
				n := int64(binary.NativeEndian.Uint64(at))
				least[0], most[0] = min(least[0], n), max(most[0], n)
			}
		}
	}
	return nil
}

func TestWrongCallsAndThreadsOfLiveWeights(t *testing.T) {
	for _, sanitizer := range []string{"address", "thread"} {
		t.Run(sanitizer, func(t *testing.T) {
			b := newWeightsBed(t, sanitizer)
			b.start(nil, "misuse", b.socket).until("ok")
		})
	}
}
