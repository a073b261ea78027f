package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/pflag"
)

func main() {
	if role := os.Getenv(roleEnv); role != "" {
		os.Exit(runRole(role))
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	f := pflag.NewFlagSet("bench", pflag.ContinueOnError)
	suite := f.String("suite", "", "transport")
	jsonFile := f.String("json", "", "write everything as JSON")
	var o transportOptions
	f.StringSliceVar(&o.Only, "only", nil, "parts")
	f.IntVar(&o.Rounds, "rounds", 7, "turns")
	f.DurationVar(&o.Round, "round", time.Second, "length of a turn")
	f.DurationVar(&o.Idle, "idle", 6*time.Second, "")
	f.IntVar(&o.Requests, "requests", 1_000_000, "")
	if err := f.Parse(args); err != nil {
		return err
	}
	if *suite != "transport" {
		return fmt.Errorf("only --suite=transport so far")
	}
	if err := o.validate(); err != nil {
		return err
	}
	say := newProgress(false)
	r, err := runTransport(ctx, o, say)
	say.clear()
	r.print(os.Stdout)
	if err != nil {
		return err
	}
	if *jsonFile != "" {
		data, err := json.MarshalIndent(map[string]any{"suite": "transport", "transport": r}, "", "  ")
		if err != nil {
			return err
		}
		return os.WriteFile(*jsonFile, append(data, '\n'), 0o644)
	}
	return nil
}
