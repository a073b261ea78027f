// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/ringbatch/ringbatch/admin"
)

func runReady(ctx context.Context, args []string) error {
	f := flags("ready", " [MODEL…]", `Check that models (default: all) are ready: an attached worker waits for work, or its batch does not
take unusually long. Exit status 0 if so, else 1 and the reason.`, `  ringbatch ready
  ringbatch ready resnet50 --wait 30s      # in a start script
  ringbatch ready --live                   # check only that the broker answers
`)
	socket := socketFlag(f)
	wait := f.Duration("wait", 0, "how long to wait for them to become ready")
	live := f.Bool("live", false, "check only that all event loops of the broker answer")
	quiet := f.BoolP("quiet", "q", false, "print nothing if they are ready")
	if err := parse(f, args, 0, -1); err != nil {
		return err
	}
	if *live && f.NArg() > 0 {
		return fmt.Errorf("%w: --live is about the broker, not about models", errUsage)
	}
	a := admin.New(*socket)
	const answer = 5 * time.Second // for a broker that is asked once
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(*wait, answer))
	defer cancel()
	if *live {
		b, err := a.Ping(ctx)
		if err == nil && !*quiet {
			_, err = fmt.Printf("live: broker pid %d\n", b.Pid)
		}
		return err
	}
	ready := a.Ready
	if *wait > 0 {
		ready = a.WaitReady
	}
	err := ready(ctx, f.Args()...)
	if err == nil && !*quiet {
		_, err = fmt.Println("ready")
	}
	return err
}
