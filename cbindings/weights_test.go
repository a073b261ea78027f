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

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/client/ringbatchtest"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

// weightsBed serves the model "m", whose answer is the least and the most of its weights.
type weightsBed struct {
	bed
	broker *ringbatchtest.Broker
	sig    tensor.Signature
	client *client.Client
}

func newWeightsBed(t *testing.T, sanitizer string) *weightsBed {
	t.Helper()
	t.Parallel()
	b := &weightsBed{bed: bed{t: t, exe: sanitizedProgram(t, sanitizer, "weights", "testdata/weights.c")}}
	var err error
	b.sig, err = tensor.ParseSignature([]string{"x:u8[1]"}, []string{"least:i64[1]", "most:i64[1]"})
	must.Do(t, err)
	models := []broker.ModelConfig{{Name: "m", Signature: b.sig}}
	b.broker = ringbatchtest.Start(t, broker.Config{Models: models, DrainTime: time.Millisecond})
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
func (b *weightsBed) ask() (v uint32, fill int64, err error) {
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

func (b *weightsBed) expect(version uint32, fill int64) {
	b.t.Helper()
	if v, f, err := b.ask(); err != nil || v != version || f != fill {
		b.t.Errorf("version %d with %d, %v; not version %d with %d", v, f, err, version, fill)
	}
}

// restart waits until requests are answered again, always with this version.
func (b *weightsBed) restart(version uint32, fill int64) {
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

func TestAnAnswerHasTheVersionThatWasPublishedBeforeIt(t *testing.T) {
	b := newWeightsBed(t, "address,undefined")
	for range 2 {
		b.start(nil, "worker", b.socket) // waits for a publisher
	}
	p := b.publisher()
	p.publish(1)
	for i := range int64(300) {
		b.expect(uint32(i+1), i+1)
		p.publish(i + 2)
	}
	b.expect(301, 301)
	p.publish(302)
	must.Do(t, admin.New(b.socket).Withdraw(b.soon(), "m", 302))
	b.expect(301, 301)
	must.Fail(t, "twice", admin.New(b.socket).Withdraw(b.soon(), "m", 302), status.ErrInvalid)
	p.say("withdrawn", "withdrawn 302 withdrawn by hand")
	p.publish(303)
	b.expect(303, 303)
	b.restart(303, 303)
	p.publish(304)
	b.until(304)
}

func TestAPublisherMayDieAtAnyMoment(t *testing.T) {
	for _, memory := range []string{"host", "device"} {
		t.Run(memory, func(t *testing.T) {
			b := newWeightsBed(t, "address,undefined")
			if memory == "host" {
				testDyingPublishers(b)
				return
			}
			b.env = []string{stubDriver(t), "TENSORS=a:i64[600]@device:0 b.c:i64[]@device:0"}
			testDyingPublishers(b)
			b.env[1] = "TENSORS=a:i64[600]@device:0 b.c:i64[]"
			b.start(nil, "publisher", b.socket).until("Invalid")
			b.env[1] = "TENSORS=a:i64[600] b.c:i64[]"
			b.start(nil, "publisher", b.socket).until("SignatureMismatch")
		})
	}
}

func testDyingPublishers(b *weightsBed) {
	p := b.publisher()
	p.publish(1)
	for range 2 {
		b.start(nil, "worker", b.socket).until("attached")
	}
	b.expect(1, 1)
	b.start(nil, "publisher", b.socket).until("Busy")
	for i := uint32(2); i < 10; i++ {
		if said := p.publish(int64(i)); said != fmt.Sprint("version ", i) {
			b.t.Fatal(said)
		}
		b.expect(i, int64(i))
		p.say("half", "half")
		p.kill()
		b.expect(i, int64(i))
		p = b.publisher()
	}
	p.say("withdrawn", "withdrawn 0 ")
	p.publish(-1)
	b.expect(9, 9)
	p.say("withdrawn", "withdrawn 10 weights below 0")
	p.publish(11)
	b.expect(11, 11)
	b.restart(11, 11) // workers keep their weights
	p.say("check", "OK")
	must.Do(b.t, testbed.Eventually(time.Minute, func() error { // a new segment, and the old version in it
		if said := b.start(nil, "worker", b.socket).until(""); said != "attached" {
			return errors.New(said)
		}
		return nil
	}))
	b.expect(11, 11)
	p.publish(12)
	b.until(12)
	p.kill()
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

// say sends a command, and waits for the line that answers it.
func (r *role) say(command, answer string) {
	fmt.Fprintln(r.stdin, command)
	r.until(answer)
}

// until waits until this version answers.
func (b *weightsBed) until(version uint32) {
	b.t.Helper()
	must.Do(b.t, testbed.Eventually(time.Minute, func() error {
		if v, _, err := b.ask(); err != nil || v != version {
			return fmt.Errorf("version %d: %w", v, err)
		}
		return nil
	}))
}

// Nothing reads the weights of a worker that is not there.
func TestAPublisherNeedsAWorkerThatFollows(t *testing.T) {
	b := newWeightsBed(t, "address,undefined")
	end := b.broker.Serve(t, worker.Config{Model: "m", Signature: b.sig}, func(context.Context, *worker.Batch) error { return nil })
	b.start(nil, "publisher", b.socket).until("NoWorker")
	end()
	p := b.publisher()
	p.kill()
}

func TestWrongCallsAndThreadsOfLiveWeights(t *testing.T) {
	for _, sanitizer := range []string{"address,undefined", "thread"} {
		t.Run(sanitizer, func(t *testing.T) {
			b := newWeightsBed(t, sanitizer)
			b.start(nil, "misuse", b.socket).until("ok")
		})
	}
}
