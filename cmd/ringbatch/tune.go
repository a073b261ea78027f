// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/ringbatch/ringbatch/tools/tune"
)

func runTune(ctx context.Context, args []string) error {
	f := flags("tune", "", `Find how many instances of a worker command, and which max_batch_size, serve a load best. Starts the
command under a broker of its own, measures every setting under real load, drops the worse half,
measures the rest longer, and so on; then writes the configuration of the best one. Without --rate
the best is the one with the most requests per second, with it the one with the least mean latency.
Ctrl-C ends everything that was started and prints the results so far.`,
		`  ringbatch tune --worker 'python serve.py' --p99 20ms --out ringbatch.toml
  ringbatch tune --worker 'ringbatch torch resnet50.jit --input x:f32[3,224,224]' --gpus 0 --mps --rate 2000
`)
	o := tune.Options{Say: progress.New()}
	f.StringVar(&o.Command, "worker", "", "the worker's command; it must attach to $RINGBATCH_SOCKET, as workers do by default")
	f.StringVar(&o.Model, "model", "", "which model to tune, if the command serves several")
	f.DurationVar(&o.Goal.P99, "p99", 0, "p99 latency that must be kept")
	f.Float64Var(&o.Goal.Rate, "rate", 0, "requests per second that must be served (default: as many as possible)")
	f.IntSliceVar(&o.GPUs, "gpus", nil, "GPUs of the instances, `N,N…`, in turn (CUDA_VISIBLE_DEVICES)")
	f.BoolVar(&o.MPS, "mps", false, "try every setting with MPS, too")
	f.IntSliceVar(&o.Instances, "instances", []int{1, 2, 3, 4}, "numbers of instances to try, `N,N…`")
	f.IntSliceVar(&o.Sizes, "batch-sizes", nil, "values of max_batch_size to try, `N,N…` (default: 1, 2, 4 … the worker's own)")
	inputs := addFeedFlags(f)
	f.DurationVar(&o.AttachTime, "wait", 2*time.Minute, "how long an instance may take to come up")
	f.DurationVar(&o.Window, "round", time.Second, "length of a measuring round; the last two settings get at least three")
	out := f.String("out", "", "write the configuration for ringbatch broker --config (TOML)")
	asJSON := f.Bool("json", false, "print JSON")
	if err := parse(f, args, 0, 0); err != nil {
		return err
	}
	if err := checkTune(&o); err != nil {
		return err
	}
	if err := progress.CanWrite(*out); err != nil {
		return fmt.Errorf("--out: %w", err)
	}
	if err := inputs.check(); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	o.Program, o.Feed = []string{self}, inputs.feed
	killOnSecondSignal()
	r, err := tune.Run(ctx, o)
	o.Say.Clear()
	var unwritten error
	if r != nil && len(r.Candidates) > 0 {
		unwritten = writeTuned(r, *out, *asJSON)
	}
	if errors.Is(err, context.Canceled) {
		fmt.Fprintln(os.Stderr, "ringbatch: interrupted; every process was ended")
		err = interrupted
	}
	if unwritten != nil {
		return unwritten
	}
	return inputs.explain(err)
}

// killOnSecondSignal kills all started processes at a second Ctrl-C, since a worker may take
// long to end. The results so far are still printed. A third Ctrl-C ends this process.
func killOnSecondSignal() {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		<-signals
		<-signals
		signal.Stop(signals)
		tune.KillAll()
	}()
}

// fewRequests are too few to compare settings.
const fewRequests = 10

func checkTune(o *tune.Options) error {
	usage := func(format string, a ...any) error { return fmt.Errorf("%w: %s", errUsage, fmt.Sprintf(format, a...)) }
	if strings.TrimSpace(o.Command) == "" {
		return usage("--worker says which command serves the model")
	}
	for _, c := range []struct {
		flag string
		list []int
		most int
	}{{"instances", o.Instances, 64}, {"batch-sizes", o.Sizes, 1 << 16}} {
		for _, n := range c.list {
			if n < 1 || n > c.most {
				return usage("--%s: %d is not a number of 1..%d", c.flag, n, c.most)
			}
		}
	}
	switch {
	case len(o.Instances) == 0:
		return usage("--instances names no number")
	case slices.ContainsFunc(o.GPUs, func(n int) bool { return n < 0 }):
		return usage("--gpus: a GPU's number is not negative")
	case o.Goal.P99 < 0 || !(o.Goal.Rate >= 0 && o.Goal.Rate <= 1e7):
		return usage("--p99 and --rate must not be negative, nor --rate above 1e7")
	case o.AttachTime <= 0:
		return usage("--wait must be positive")
	case o.Window < 100*time.Millisecond || o.Window > time.Minute:
		return usage("--round is %v, must be 100ms..1m", o.Window)
	case o.Goal.Rate > 0 && o.Goal.Rate*o.Window.Seconds() < fewRequests:
		return usage("--rate %v: %.1f requests would come in a round of %v, too few to judge by; a longer --round has more",
			o.Goal.Rate, o.Goal.Rate*o.Window.Seconds(), o.Window)
	}
	return nil
}

// writeTuned writes the results, even of an interrupted run. It prints them even if the
// file cannot be written.
func writeTuned(r *tune.Report, out string, asJSON bool) error {
	var failed error
	if out != "" && r.Choice != nil {
		if err := writeFile(out, func(w io.Writer) error { _, err := io.WriteString(w, r.TOML()); return err }); err != nil {
			failed = fmt.Errorf("--out: %w", err)
		}
	}
	if asJSON {
		e := json.NewEncoder(os.Stdout)
		e.SetIndent("", "  ")
		return errors.Join(failed, e.Encode(r))
	}
	if err := r.WriteText(os.Stdout); err != nil {
		return errors.Join(failed, err)
	}
	switch {
	case out == "" || failed != nil:
	case r.Choice != nil:
		fmt.Printf("%s: ringbatch broker --config %s\n", out, out)
	default:
		fmt.Printf("%s was not written: there is no setting to recommend\n", out)
	}
	return failed
}
