// SPDX-License-Identifier: Apache-2.0

// Command ringbatch runs the broker and built-in workers, and asks them
// things.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/pflag"

	"github.com/ringbatch/ringbatch/internal/printable"
	"github.com/ringbatch/ringbatch/internal/typo"
)

// command is one subcommand. run gets the arguments after its name.
type command struct {
	name, brief string
	run         func(ctx context.Context, args []string) error
}

// errUsage marks mistakes in the command line: exit status 2, not 1.
var errUsage = errors.New("usage")

// exitCode carries an exit status of its own.
type exitCode int

func (e exitCode) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

func commands() []command {
	return []command{
		{"broker", "run the broker of this host", runBroker},
		{"worker", "serve a built-in model", runWorker},
		{"serve", "serve a model file or a Python object, whatever it is", runServe},
		{"torch", "serve a PyTorch model", runTorch},
		{"onnx", "serve an ONNX file with ONNX Runtime", runOnnx},
		{"infer", "send one request, for trying", runInfer},
		{"gateway", "open a network door to the models: HTTP and gRPC", runGateway},
		{"ready", "exit status 0 if models would answer", runReady},
		{"relay", "serve a model that runs on other hosts", runRelay},
		{"dashboard", "serve a page that shows the broker at work", runDashboard},
		{"stats", "show what the broker counts", runStats},
		{"top", "show the broker at work, live in the terminal", runTop},
		{"trace", "record what happens to a model's requests, for Perfetto", runTrace},
		{"models", "list the broker's models", runModels},
		{"set", "change a model's batching policy while it runs", runSet},
		{"restart", "replace a model's worker processes, one by one", runRestart},
		{"scale", "run another number of a model's worker processes", runScale},
		{"alias", "have a name stand for a version of a model, or for a share of several", runAlias},
		{"profile", "measure what batches of a running model take", runProfile},
		{"demo", "show the page, with a load on a broker of its own", runDemo},
		{"bench", "load a running model, and measure it", runBench},
		{"tune", "find how many workers and which batches serve a load best", runTune},
		{"simulate", "play a batching policy against a virtual clock", runSimulate},
		{"doctor", "check this machine, and say what to do", runDoctor},
		{"completion", "print a completion script for a shell", runCompletion},
		{"version", "print the version", runVersion},
		{"licenses", "print the licences of what this command contains", runLicenses},
	}
}

func main() {
	signals := endings(os.Args[1:])
	ctx, stop := signal.NotifyContext(context.Background(), signals...)
	go func() { // a second Ctrl-C ends at once
		<-ctx.Done()
		if slices.Contains(signals, os.Signal(syscall.SIGHUP)) { // but of a closed terminal two come: the shell's and the kernel's
			signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
		}
		stop()
	}()
	err := dispatch(ctx, os.Args[1:])
	var code exitCode
	switch {
	case err == nil, errors.Is(err, pflag.ErrHelp):
	case errors.As(err, &code):
		os.Exit(int(code))
	case errors.Is(err, errUsage):
		fmt.Fprintln(os.Stderr, "ringbatch:", err)
		os.Exit(2)
	default:
		fmt.Fprintln(os.Stderr, "ringbatch:", printable.Lines(err.Error(), 16<<10)) // it may be a worker's text
		os.Exit(1)
	}
}

func dispatch(ctx context.Context, args []string) error {
	if len(args) > 2 && args[0] == "help" {
		return fmt.Errorf("%w: help is for one command, not for %q", errUsage, args[1:])
	}
	if len(args) > 1 && args[0] == "help" { // of a command
		args = []string{args[1], "--help"}
	}
	if len(args) == 0 || args[0] == "help" || args[0] == "-h" || args[0] == "--help" {
		printUsage(os.Stdout)
		if len(args) == 0 {
			return exitCode(2)
		}
		return nil
	}
	if args[0] == "--version" {
		args[0] = "version"
	}
	var names []string
	for _, c := range commands() {
		if c.name == args[0] {
			return c.run(ctx, args[1:])
		}
		names = append(names, c.name)
	}
	if args[0] == "manual" { // for packages
		return runManual(ctx, args[1:])
	}
	return fmt.Errorf("%w: no command %q%s; see ringbatch --help", errUsage, args[0], typo.DidYouMean(args[0], names))
}

func printUsage(w io.Writer) {
	fmt.Fprint(w, `ringbatch collects single inferences of many processes into batches, in shared memory.

Usage: ringbatch COMMAND [flags]

`)
	for _, c := range commands() {
		fmt.Fprintf(w, "  %-10s %s\n", c.name, c.brief)
	}
	fmt.Fprint(w, `
Each command explains its flags with --help. To try it, in three terminals:

  ringbatch broker
  ringbatch worker --model affine --scale 2 --offset 1
  ringbatch infer affine 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16
`)
}

// flags makes a flag set whose help shows how the command is used.
func flags(name, args, about, examples string) *pflag.FlagSet {
	f := pflag.NewFlagSet(name, pflag.ContinueOnError)
	f.SortFlags = false
	f.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		return pflag.NormalizedName(strings.ReplaceAll(name, "-", "_")) // --wait-time is --wait_time
	})
	f.Usage = func() {
		fmt.Printf("%s\n\nUsage: ringbatch %s [flags]%s\n\n%s", about, name, args, f.FlagUsages())
		if examples != "" {
			fmt.Printf("\nExamples:\n%s", examples)
		}
	}
	return f
}

// parse reads the flags and checks the number of arguments.
func parse(f *pflag.FlagSet, args []string, least, most int) error {
	if err := f.Parse(args); err != nil {
		if errors.Is(err, pflag.ErrHelp) {
			return err
		}
		return fmt.Errorf("%w: %v; see ringbatch %s --help", errUsage, err, f.Name())
	}
	if n := f.NArg(); n < least || most >= 0 && n > most {
		return fmt.Errorf("%w: wrong number of arguments; see ringbatch %s --help", errUsage, f.Name())
	}
	return nil
}

func socketFlag(f *pflag.FlagSet) *string {
	return f.String("socket", "", "the broker's control socket (default: $RINGBATCH_SOCKET, else ringbatch/broker.sock in the user's runtime folder)")
}
