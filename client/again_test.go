package client_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/client"
)

// "The broker went away; retry" alone would send somebody whose model is no
// longer declared to look at a broker that runs.
func TestAClientThatCannotAttachAgainSaysWhy(t *testing.T) {
	r := newRing(t, plain(t))
	c := r.dial(client.WithWindow(16))
	r.stop()
	claim := func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
		defer cancel()
		_, err := c.Claim(ctx, 1)
		return err
	}
	says := func(want error) {
		t.Helper()
		var err error
		for end := time.Now().Add(patience); time.Now().Before(end); {
			if err = claim(); errors.Is(err, want) {
				break
			}
		}
		for _, e := range []error{want, client.ErrBrokerGone, context.DeadlineExceeded} {
			if !errors.Is(err, e) {
				t.Errorf("%v does not say: %v", err, e)
			}
		}
	}
	says(client.ErrNoBroker)
	was := r.model
	r.model.Slots = 8
	r.start()
	says(client.ErrRingFull)
	r.stop()
	r.model.Name = "other"
	r.start()
	says(client.ErrUnknownModel)
	r.stop()
	r.model = was
	r.start()
	req, err := c.Claim(soon(t), 1)
	if err != nil {
		t.Fatal(err)
	}
	_ = req.Release()
}
