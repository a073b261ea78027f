// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/ringbatch/ringbatch/internal/policyflag"
	"github.com/ringbatch/ringbatch/internal/typo"
	"github.com/ringbatch/ringbatch/policy"
)

// flagSet holds the flags of one command.
type flagSet struct {
	*pflag.FlagSet
	usage  string            // "infer [flags] MODEL [NUMBER…]"
	policy *policyflag.Flags // nil: the command has none
	help   func() string
}

// flags makes a flag set whose help shows how the command is used.
func flags(name, args, about, examples string) *flagSet {
	f := &flagSet{FlagSet: pflag.NewFlagSet(name, pflag.ContinueOnError), usage: name + " [flags]" + args}
	f.SortFlags = false
	f.SetOutput(io.Discard)
	f.Usage = func() {} // parse prints the help
	f.help = func() string {
		text := fmt.Sprintf("%s\n\nUsage: ringbatch %s\n\n%s%s", about, f.usage, f.FlagUsages(), f.policyNames())
		if examples != "" {
			text += "\nExamples:\n" + examples
		}
		return text
	}
	return f
}

// addPolicy adds the policy's flags. The command's help only names them.
func addPolicy(f *flagSet) *policyflag.Flags {
	f.policy = policyflag.Add(f.FlagSet)
	for _, name := range f.policy.Names() {
		_ = f.MarkHidden(name)
	}
	return f.policy
}

// policyNames is the part of a command's help that names the policy's flags.
func (f *flagSet) policyNames() string {
	if f.policy == nil {
		return ""
	}
	const width = 100
	text, line := "\nPolicy flags (ringbatch help policy explains them):\n", ""
	for _, name := range f.policy.Names() {
		if len(line)+len(name) > width {
			text, line = text+line+"\n", ""
		}
		line += "  --" + name
	}
	return text + line + "\n"
}

// policyHelp explains the policy's flags.
func policyHelp() string {
	f := flags("policy", "", "", "")
	policyflag.Add(f.FlagSet)
	return fmt.Sprintf(`Flags of ringbatch broker, worker, relay, serve, torch and onnx that set a model's batching policy.
In a configuration file and for ringbatch set, a key has underscores: wait_time = "5ms".

Usage: ringbatch broker|worker|relay [flags]

%s`, f.FlagUsages())
}

// parse reads the flags and checks the number of arguments.
func parse(f *flagSet, args []string, least, most int) error {
	f.VisitAll(func(flag *pflag.Flag) {
		if flag.Value.Type() == "duration" {
			flag.Value = duration{flag.Value}
		}
	})
	if err := f.Parse(args); errors.Is(err, pflag.ErrHelp) {
		if _, unwritten := fmt.Print(f.help()); unwritten != nil {
			return unwritten
		}
		return err
	} else if err != nil {
		return fmt.Errorf("%w: %s; see ringbatch %s --help", errUsage, f.explain(err), f.Name())
	}
	if n := f.NArg(); n < least {
		needed := strings.Fields(strings.TrimPrefix(f.usage, f.Name()+" [flags]"))[n]
		return fmt.Errorf("%w: %s needs a %s\nUsage: ringbatch %s", errUsage, f.Name(), strings.Trim(needed, "[]…"), f.usage)
	} else if most >= 0 && n > most {
		return fmt.Errorf("%w: %s does not take the argument %q\nUsage: ringbatch %s", errUsage, f.Name(), f.Arg(most), f.usage)
	}
	return nil
}

// explain is a text about a wrong flag.
func (f *flagSet) explain(err error) string {
	var unknown *pflag.NotExistError
	var invalid *pflag.InvalidValueError
	switch {
	case errors.As(err, &unknown) && unknown.GetSpecifiedShortnames() == "":
		typed := unknown.GetSpecifiedName()
		var names []string
		f.VisitAll(func(flag *pflag.Flag) { names = append(names, flag.Name) })
		return fmt.Sprintf("no flag --%s%s", typed, strings.Replace(typo.DidYouMean(typed, names), "mean ", "mean --", 1))
	case errors.As(err, &invalid):
		kind := invalid.GetFlag().Value.Type()
		why := map[string]string{
			"float64": "not a number", "int": "not a whole number", "int64": "not a whole number",
			"intSlice": "not whole numbers, like 1,2,4", "uint16": "not a port, 0..65535", "bool": "neither true nor false",
		}[kind]
		if why == "" {
			why = strings.TrimPrefix(errors.Unwrap(err).Error(), strconv.Quote(invalid.GetValue())+" is ")
		}
		return fmt.Sprintf("--%s %s: %s", invalid.GetFlag().Name, invalid.GetValue(), why)
	}
	return err.Error()
}

// duration reads a duration as the policy does: 5ms, 1.5s, or seconds as a number.
type duration struct{ pflag.Value }

func (d duration) Set(text string) error {
	parsed, err := policy.ParseDuration(text)
	if err != nil {
		return err
	}
	return d.Value.Set(parsed.String())
}

func waitFlag(f *flagSet) *time.Duration {
	return f.Duration("wait", 0, "how long to wait for a broker that does not run yet")
}

// joinFlag returns a function that reads the flag: the version of a worker, or "" for its own.
func joinFlag(f *flagSet) func() (string, error) {
	join := f.String("join", "", "`any`: serve the model also beside workers that compute something else")
	return func() (string, error) {
		if *join != "" && *join != "any" {
			return "", fmt.Errorf("%w: --join %s: want any", errUsage, *join)
		}
		return *join, nil
	}
}

func socketFlag(f *flagSet) *string {
	return f.String("socket", "", "the broker's socket (default: $RINGBATCH_SOCKET, else ringbatch/broker.sock in the user's "+
		"runtime folder)")
}
