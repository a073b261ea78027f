// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"os"

	"github.com/ringbatch/ringbatch/relay"
	"github.com/ringbatch/ringbatch/tensor"
)

func runRelay(ctx context.Context, args []string) error {
	f := flags("relay", " MODEL --to TARGET",
		`Serve a model that runs on other hosts: whole batches go over gRPC to ringbatch gateways there, or
to other servers of the Open Inference Protocol. If the broker here does not know the model yet,
this relay declares it with the policy given here and the signature of the far side.`,
		`  ringbatch relay resnet50 --to gpu1:8001,gpu2:8001
  ringbatch relay resnet50 --to dns:///gpus.example.com:8001
  ringbatch relay resnet50 --to gpus:8001 --tls-ca ca.pem --token-file token
  ringbatch relay tokens --to triton:8001 --input 'ids:i64[<=512]' --output 'logits:f32[<=512,2]'
`)
	var cfg relay.Config
	socket := socketFlag(f)
	f.StringVar(&cfg.Target, "to", "", "the other hosts: HOST:PORT,HOST:PORT… or a gRPC target such as dns:///NAME:PORT")
	f.StringVar(&cfg.Remote, "remote-model", "", "the model's name there (default: the same)")
	f.IntVar(&cfg.InFlight, "in-flight", relay.DefaultInFlight, "most batches on the network at once")
	f.IntVar(&cfg.Attempts, "attempts", relay.DefaultAttempts, "hosts that one batch is sent to at most")
	f.BoolVar(&cfg.TLS, "tls", false, "TLS, with this system's certificate authorities")
	f.StringVar(&cfg.CAFile, "tls-ca", "", "TLS, with these authorities of the far side's certificate (PEM)")
	f.StringVar(&cfg.CertFile, "tls-cert", "", "this relay's certificate (PEM; all three are read again for every connection)")
	f.StringVar(&cfg.KeyFile, "tls-key", "", "and its key")
	f.StringVar(&cfg.ServerName, "server-name", "", "the name in the far side's certificate (default: the target's)")
	f.StringVar(&cfg.TokenFile, "token-file", "", "show the first bearer token of this file with every call (read again when it changes)")
	f.BoolVar(&cfg.Insecure, "insecure", false, "send the token without TLS, in a protected network")
	f.DurationVar(&cfg.CheckInterval, "check-interval", relay.DefaultCheckInterval, "how often each host is checked")
	f.DurationVar(&cfg.CheckTimeout, "check-timeout", relay.DefaultCheckTimeout, "how long a host may take to answer a check")
	inputs := f.StringArray("input", nil, "the largest sizes of an input's variable dimensions, a `SPEC` like ids:i64[<=512], if "+
		"the far side does not say (repeatable)")
	outputs := f.StringArray("output", nil, "the same for an output (`SPEC`)")
	wait, join := waitFlag(f), joinFlag(f)
	logs := addLogFlags(f)
	asked := addPolicy(f)
	if err := parse(f, args, 0, 1); err != nil {
		return err
	}
	for _, flag := range []string{"in-flight", "attempts", "check-interval", "check-timeout"} {
		if v := f.Lookup(flag).Value.String(); f.Changed(flag) && (v == "0" || v == "0s") { // in relay.Config 0 is the default
			return fmt.Errorf("%w: --%s must be more than 0", errUsage, flag)
		}
	}
	var err error
	if cfg.Version, err = join(); err != nil {
		return err
	}
	cfg.WaitForBroker, cfg.Model = *wait, os.Getenv("RINGBATCH_MODEL") // set by a broker that starts relays
	if f.NArg() == 1 {
		cfg.Model = f.Arg(0)
	}
	if cfg.Model == "" || cfg.Target == "" {
		return fmt.Errorf("%w: say which model, and --to where\nUsage: ringbatch %s", errUsage, f.usage)
	}
	cfg.Socket, cfg.Name = *socket, cmp.Or(os.Getenv("RINGBATCH_WORKER_NAME"), "relay")
	if cfg.Inputs, err = tensor.ParseSpecs(*inputs, nil); err != nil {
		return err
	}
	if cfg.Outputs, err = tensor.ParseSpecs(*outputs, nil); err != nil {
		return err
	}
	if cfg.Policy, err = asked.Policy(); err != nil {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	log, written, err := logs.open(os.Stderr)
	if err != nil {
		return err
	}
	defer written.End()
	cfg.Logger = log
	cfg.Started = func(sig *tensor.Signature, maxBatch int) {
		input, output := int64(0), int64(0) // bytes of a row
		for i := range sig.Inputs {
			input += int64(sig.Inputs[i].RowBytes())
		}
		for i := range sig.Outputs {
			output += int64(sig.Outputs[i].RowBytes())
		}
		limitProcs(int64(maxBatch) * (input + output))
		collectSeldom(int64(cfg.InFlight) * int64(maxBatch) * output) // inputs stay in the ring
		fmt.Printf("relaying %s to %s: %s\n", cfg.Model, cfg.Target, sig)
	}
	return relay.Run(ctx, cfg)
}
