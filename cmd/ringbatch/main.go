// SPDX-License-Identifier: Apache-2.0

// Command ringbatch runs the broker, workers and the gateway, and inspects them.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/pflag"

	"github.com/ringbatch/ringbatch/internal/printable"
	"github.com/ringbatch/ringbatch/internal/typo"
	"github.com/ringbatch/ringbatch/status"
)

// command is a subcommand. run gets the arguments after its name.
type command struct {
	name, brief string
	run         func(ctx context.Context, args []string) error
}

// group is a group of commands in the help.
type group struct {
	title    string
	commands []command
}

// errUsage marks mistakes in the command line: exit status 2, not 1.
var errUsage = errors.New("usage")

// exitCode is an error with an exit status. It prints no text.
type exitCode int

func (e exitCode) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

func groups() []group {
	return []group{
		{"Start", []command{
			{"serve", "serve a model: PyTorch, ONNX, scikit-learn or Python", runServe},
			{"broker", "run the broker of this host", runBroker},
			{"worker", "serve a built-in model", runWorker},
			{"torch", "serve a PyTorch model", runTorch},
			{"onnx", "serve an ONNX file with ONNX Runtime", runOnnx},
			{"gateway", "serve models over HTTP and gRPC", runGateway},
			{"relay", "serve a model that runs on other hosts", runRelay},
		}},
		{"Try", []command{
			{"infer", "send one test request", runInfer},
			{"demo", "show the dashboard with a broker, workers and a load", runDemo},
			{"bench", "load a running model and measure it", runBench},
			{"simulate", "how many workers, what batch size, and what that gives", runSimulate},
		}},
		{"Look", []command{
			{"models", "list the broker's models", runModels},
			{"stats", "print the broker's statistics", runStats},
			{"top", "show models and workers live in the terminal", runTop},
			{"dashboard", "serve a web page with live charts, and metrics", runDashboard},
			{"trace", "record a model's requests for Perfetto", runTrace},
			{"ready", "check that models are ready", runReady},
			{"doctor", "check this machine and suggest fixes", runDoctor},
		}},
		{"Change", []command{
			{"set", "change a model's batching policy while it runs", runSet},
			{"scale", "set the number of worker processes", runScale},
			{"sleep", "end a model's worker processes until a request comes", runSleep},
			{"wake", "start the worker processes of a model that sleeps", runWake},
			{"restart", "replace a model's worker processes one by one", runRestart},
			{"weights", "show or withdraw the live weights of a model", runWeights},
			{"alias", "route a name to model versions (canary)", runAlias},
		}},
		{"Other", []command{
			{"version", "print the version", runVersion},
			{"licenses", "print the licences of the software in this command", runLicenses},
		}},
	}
}

func commands() (list []command) {
	for _, g := range groups() {
		list = append(list, g.commands...)
	}
	return list
}

func main() {
	signals := endings(os.Args[1:])
	ctx, stop := signal.NotifyContext(context.Background(), signals...)
	go func() { // a second Ctrl-C ends at once
		<-ctx.Done()
		if slices.Contains(signals, os.Signal(syscall.SIGHUP)) { // a closed terminal sends it twice: shell and kernel
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
	default:
		fmt.Fprintln(os.Stderr, "ringbatch:", printable.Lines(plain(err), 16<<10)) // a worker may have written the text
		if errors.Is(err, errUsage) {
			os.Exit(2)
		}
		os.Exit(1)
	}
}

var dialing = regexp.MustCompile(`^dial \S+: `)

// plain is an error's text without the words that only classify it.
func plain(err error) string {
	text := dialing.ReplaceAllString(err.Error(), "")
	text = strings.Replace(text, status.ErrUnknownModel.Error()+": ", "no such model: ", 1)
	for _, sort := range []error{errUsage, status.ErrInvalid, status.ErrSize} {
		text = strings.Replace(text, sort.Error()+": ", "", 1)
	}
	return text
}

func dispatch(ctx context.Context, args []string) error {
	if len(args) > 2 && args[0] == "help" {
		return fmt.Errorf("%w: help is for one command, not for %q", errUsage, args[1:])
	}
	if len(args) > 1 && args[0] == "help" { // of a command
		args = []string{args[1], "--help"}
	}
	if len(args) == 0 || args[0] == "help" || args[0] == "-h" || args[0] == "--help" {
		if _, err := fmt.Print(usage()); err != nil {
			return err
		}
		if len(args) == 0 {
			return exitCode(2)
		}
		return nil
	}
	if args[0] == "--version" || args[0] == "-v" {
		args[0] = "version"
	}
	var names []string
	for _, c := range commands() {
		if c.name == args[0] {
			return c.run(ctx, args[1:])
		}
		names = append(names, c.name)
	}
	if slices.Equal(args, []string{"policy", "--help"}) {
		_, err := fmt.Print(policyHelp())
		return err
	}
	return fmt.Errorf("%w: no command %q%s; see ringbatch --help", errUsage, args[0], typo.DidYouMean(args[0], names))
}

// usage is the list of commands.
func usage() string {
	text := "Dynamic batching for many processes, in shared memory.\n\nUsage: ringbatch COMMAND [flags]\n"
	for _, g := range groups() {
		text += fmt.Sprintf("\n%s\n", g.title)
		for _, c := range g.commands {
			text += fmt.Sprintf("  %-11s %s\n", c.name, c.brief)
		}
	}
	return text + "\n`ringbatch COMMAND --help` explains a command, `ringbatch help policy` the batching policy's flags.\n" +
		"To see it at work: ringbatch demo\n"
}
