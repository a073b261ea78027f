// SPDX-License-Identifier: Apache-2.0

package worker_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
)

func TestPackedRowsHaveTheirTrueSizes(t *testing.T) {
	words, err := tensor.ParseSignature([]string{"x:u8[<=8,2]", "k:u8[]", "in:u8[2,<=2]"}, []string{"y:u8[<=8,2]", "n:u8[]", "few:u8[<=4]"})
	must.Do(t, err)
	texts := []string{"aabbcc", "", "ddeeffgghhiijjkk", "ll"}
	for name, how := range map[string]policy.Setting{"ragged": policy.Ragged(true), "buckets": policy.Buckets("x", 0, 8)} {
		settings := policy.New(how, policy.Slots(256), policy.MaxBatchSize(len(texts)), policy.WaitTime(time.Hour))
		r := newRing(t, len(texts))
		r.broker.Config.Models[0].Policy = settings
		r.restart(words)
		cfg := r.config(1)
		cfg.Signature, cfg.Policy = words, settings
		r.dial() // silent: the broker waits for a full batch
		w, c := r.attach(cfg), r.dial()
		var reqs []client.Request
		for _, text := range texts {
			req, err := c.Claim(soon(t), 1, len(text)/2, 2)
			must.Do(t, err)
			x, err := req.Input("x")
			must.Do(t, err)
			copy(x.Data, text)
			must.Do(t, req.Commit(soon(t)))
			reqs = append(reqs, req)
		}
		b, packed := next(t, w), make([]byte, 24)
		_, n, small := b.Pack(0, packed[:23])
		offsets, _, err := b.Pack(0, packed)
		must.Do(t, err)
		if n != 24 || !slices.Equal(offsets, []int32{0, 3, 3, 11, 12}) || string(packed) != "aabbccddeeffgghhiijjkkll" {
			t.Errorf("%s: %d bytes, offsets %v, %q", name, n, offsets, packed)
		}
		if offsets, n, err := b.Pack(1, packed); err != nil || n != 4 || !slices.Equal(offsets, []int32{0, 1, 2, 3, 4}) {
			t.Errorf("%s: a fixed input has %d bytes, offsets %v, %v", name, n, offsets, err)
		}
		_, _, inner := b.Pack(2, packed)
		must.Fail(t, "too small a buffer", small, status.ErrSize)
		must.Fail(t, "an inner dimension", inner, status.ErrShape)
		must.Fail(t, "an output that is too small", b.Unpack(2, packed), status.ErrShape)
		must.Fail(t, "too few bytes", b.Unpack(0, packed[1:]), status.ErrSize)
		must.Do(t, errors.Join(b.Unpack(0, packed), b.Unpack(1, packed)))
		testbed.Touch(b) // the failed Unpack has written nothing
		must.Do(t, b.Complete())
		for i, req := range reqs {
			must.Do(t, req.Wait(soon(t)))
			y, err := req.Output("y")
			must.Do(t, err)
			want := fmt.Sprintf("%q %v", string(packed[2*offsets[i]:2*offsets[i+1]]), []int{1, len(texts[i]) / 2, 2})
			if got := fmt.Sprintf("%q %v", string(y.Data[:len(texts[i])]), y.Shape); got != want {
				t.Errorf("%s: request %d has %s, want %s", name, i, got, want)
			}
		}
	}
}
