// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/broker/configfile"
	"github.com/ringbatch/ringbatch/internal/policyflag"
	"github.com/ringbatch/ringbatch/internal/sdnotify"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

func runBroker(ctx context.Context, args []string) error {
	f := flags("broker", "", `Run the broker: one per host and user. Models come from --config, from --model, or from the first
worker that registers one. SIGTERM and Ctrl-C drain, a second one does not wait; SIGHUP reads
--config again.`, `  ringbatch broker                                  # models are declared by their workers
  ringbatch broker --config ringbatch.toml
  ringbatch broker --model affine --input 'x:f32[16]' --output 'y:f32[16]' --max-batch-size 32 --wait-time 5ms
`)
	socket := socketFlag(f)
	config := f.String("config", "", "configuration file (TOML)")
	model := modelFlags(f)
	allow := f.IntSlice("allow-uid", nil, "also let the user with this `UID` connect, and infer (repeatable)")
	grants := f.StringArray("allow", nil, "also give rights to a user, or to a group after @, as `USER=RIGHTS`: web=infer, "+
		"@ml=infer,serve, 1001=infer,serve,administer (repeatable); this user has all rights")
	open := f.Bool("open-folder", false, "accept a socket folder that others may enter; the uid list then decides alone")
	drain := f.Duration("drain-time", broker.DefaultDrainTime, "how long accepted requests may take to finish after SIGTERM")
	loops := f.Int("loops", 0, "event loops that share the models (default: one for every two cores, 8 at most)")
	mps := f.Bool("mps", false, "let the broker's GPU workers share GPUs through MPS: use a running daemon or start a private one")
	idle := f.Duration("idle", 0, "end after that long without a client, like 10m; 0s is never")
	detach := f.Bool("detach", false, "start the broker in the background, unless one runs, and return when it listens; its log is "+
		"SOCKET.log, its configuration without --config ringbatch/ringbatch.toml in $XDG_CONFIG_HOME, ~/.config by default")
	takeOver := f.Bool("take-over", false, "start the workers, then take the socket over from the running broker, which finishes "+
		"its requests and ends")
	logs := addLogFlags(f)
	if err := parse(f, args, 0, 0); err != nil {
		return err
	}
	if *idle != 0 && *idle < time.Second {
		return fmt.Errorf("%w: --idle is %v, must be 1s or more: clients need some time to connect", errUsage, *idle)
	}
	if *detach && *takeOver {
		return fmt.Errorf("%w: --detach starts a broker if none runs, and --take-over replaces one; give one of them", errUsage)
	}
	if *detach {
		return detachBroker(ctx, *socket, *config == "" && *model.name == "", args)
	}
	log, written, err := logs.open(os.Stderr)
	if err != nil {
		return err
	}
	defer written.End()
	// If the reader of the log goes away, the broker goes on. Worker processes would
	// inherit signal.Ignore, so the signal is received instead.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP) // an early SIGHUP must not end the broker
	defer signal.Stop(hup)
	load := func() (broker.Config, error) {
		var cfg broker.Config
		if *config != "" {
			if cfg, err = configfile.Load(*config); err != nil {
				return cfg, err
			}
			if err := checkGateway(cfg.Workers); err != nil {
				return cfg, err
			}
			saved := configfile.NewSaved(*config, os.Getenv("STATE_DIRECTORY"))
			if err := saved.Apply(&cfg); err != nil {
				return cfg, err
			}
			cfg.Save, cfg.SaveAlias = saved.Save, saved.SaveAlias
		}
		m, err := model.config(f)
		if err != nil {
			return cfg, err
		}
		cfg.Models = append(cfg.Models, m...)
		if *socket != "" {
			cfg.Socket = *socket
		}
		cfg.AllowedUIDs = append(cfg.AllowedUIDs, *allow...)
		for _, text := range *grants {
			g, err := configfile.ParseGrant(text)
			if err != nil {
				return cfg, fmt.Errorf("%w: --allow %s: %w", errUsage, text, err)
			}
			cfg.Grants = append(cfg.Grants, g)
		}
		cfg.OpenFolder = cfg.OpenFolder || *open
		cfg.MPS, cfg.Idle = cfg.MPS || *mps, *idle
		if f.Changed("loops") {
			if cfg.Loops = *loops; *loops < 1 { // 0 is the default
				return cfg, fmt.Errorf("%w: --loops must be 1..%d", errUsage, broker.MaxLoops)
			}
		}
		if f.Changed("drain-time") {
			if cfg.DrainTime = *drain; *drain <= 0 {
				cfg.DrainTime = -1 // 0 is the default
			}
		}
		cfg.Logger = log
		return cfg, nil
	}
	cfg, err := load()
	if err != nil {
		return err
	}
	if *takeOver {
		cfg.TakeOver = func(ctx context.Context) error {
			if err := admin.New(cfg.Socket).HandOver(ctx); err != nil && !errors.Is(err, status.ErrNoBroker) {
				return err
			}
			return nil
		}
	} else if err := checkGatewayPorts(cfg.Workers); err != nil {
		return err
	}
	b, err := broker.New(cfg)
	if err != nil {
		return err
	}
	manager := sdnotify.FromEnvironment() // before a worker process inherits it
	serves := func() { manager.Ready(fmt.Sprintf("serves %s", b.Socket())) }
	go func() {
		for range hup {
			<-b.Listening() // a broker that takes over starts its workers first
			manager.Reloading()
			if *config == "" {
				log.Warn("SIGHUP: nothing to reload, the broker runs without --config")
				serves()
				continue
			}
			cfg, err := load()
			if err == nil {
				err = b.Reload(cfg)
			}
			if err != nil {
				log.Error("SIGHUP: configuration refused, nothing changed", "error", err)
			} else {
				log.Info("SIGHUP: configuration reloaded")
			}
			serves()
		}
	}()
	go func() {
		<-b.Listening()
		serves()
	}()
	go manager.Watchdog(ctx, b.Alive)
	context.AfterFunc(ctx, manager.Stopping)
	return serveUntilInsisted(ctx, b, log)
}

// modelArgs are the flags that declare a single model.
type modelArgs struct {
	name    *string
	inputs  *[]string
	outputs *[]string
	state   *[]string
	policy  *policyflag.Flags
}

func modelFlags(f *flagSet) *modelArgs {
	return &modelArgs{
		name:    f.String("model", "", "declare one model of this name"),
		inputs:  f.StringArray("input", nil, "its input tensor, a `SPEC` like x:f32[3,224,224]; <=N is a variable dimension (repeatable)"),
		outputs: f.StringArray("output", nil, "its output tensor, a `SPEC` (repeatable)"),
		state:   f.StringArray("state", nil, "a tensor that sequences keep from step to step, a `SPEC` (repeatable)"),
		policy:  addPolicy(f),
	}
}

// config is the declared model, if the flags name one.
func (a *modelArgs) config(f *flagSet) ([]broker.ModelConfig, error) {
	if *a.name == "" {
		flag := a.policy.Given()
		for _, other := range []string{"input", "output", "state"} {
			if f.Changed(other) {
				flag = other
			}
		}
		if flag != "" {
			return nil, fmt.Errorf("%w: --%s declares a model and needs --model", errUsage, flag)
		}
		return nil, nil
	}
	sig, err := tensor.ParseSignature(*a.inputs, *a.outputs, *a.state...)
	if err != nil {
		return nil, err
	}
	m := broker.ModelConfig{Name: *a.name, Signature: sig}
	if m.Policy, err = a.policy.Policy(); err == nil {
		_, err = m.Policy.Resolve(sig.Inputs)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errUsage, err)
	}
	return []broker.ModelConfig{m}, nil
}
