// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/ringbatch/ringbatch"
	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/broker/configfile"
	"github.com/ringbatch/ringbatch/broker/supervise"
	"github.com/ringbatch/ringbatch/gateway"
	"github.com/ringbatch/ringbatch/gateway/console"
	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/sdnotify"
	"github.com/ringbatch/ringbatch/tensor"
)

func runGateway(ctx context.Context, args []string) error {
	cfg, logs, err := gatewayConfig(args)
	if err != nil {
		return err
	}
	if err := errors.Join(checkPort(cfg.HTTP, "http"), checkPort(cfg.GRPC, "grpc")); err != nil {
		return err
	}
	log, written, err := logs.open(os.Stderr)
	if err != nil {
		return err
	}
	defer written.End()
	cfg.Logger, cfg.Version = log, ringbatch.Version()
	doors := &doorMetrics{}
	cfg.Other = consoleHandler(console.Config{
		Socket: cfg.Socket, AdminTokenFile: cfg.AdminTokenFile, More: []prometheus.Collector{doors},
	})
	manager := sdnotify.FromEnvironment()
	cfg.Started = func(web, rpc net.Addr) {
		greet(ctx, &cfg, web, rpc)
		manager.Ready("serves")
	}
	go manager.Watchdog(ctx, func() {})
	context.AfterFunc(ctx, manager.Stopping)
	c, err := core.New(cfg)
	if err != nil {
		return err
	}
	g := gateway.New(c)
	doors.gateway = g
	collectSeldom(int64(cfg.MaxBufferedBytes))
	return g.Serve(ctx)
}

// doorMetrics are the metrics of the gateway's listeners.
type doorMetrics struct{ gateway *gateway.Gateway }

var refusedConnections = prometheus.NewDesc("ringbatch_gateway_connections_refused_total",
	"Connections that were refused since there were too many, of all or of their address.", []string{"door"}, nil)

func (*doorMetrics) Describe(ch chan<- *prometheus.Desc) { ch <- refusedConnections }

func (m *doorMetrics) Collect(ch chan<- prometheus.Metric) {
	for door, n := range m.gateway.RefusedConnections() {
		ch <- prometheus.MustNewConstMetric(refusedConnections, prometheus.CounterValue, float64(n), door)
	}
}

// gatewayConfig reads the flags, or the section [gateway] of a broker's file as flags.
func gatewayConfig(args []string) (cfg core.Config, logs *logFlags, err error) {
	f := flags("gateway", "", `Serve the broker's models over HTTP and gRPC: Open Inference Protocol (KServe v2) with Triton's
extensions. By default only callers on this host are served.`,
		`  ringbatch gateway
  ringbatch gateway --system-shared-memory
  ringbatch gateway --http 0.0.0.0:8000 --grpc off --tls-cert cert.pem --tls-key key.pem --token-file tokens
`)
	socket := socketFlag(f)
	f.StringVar(&cfg.HTTP, "http", core.DefaultHTTP, "address of the HTTP listener, or a port on this host, or off")
	f.StringVar(&cfg.GRPC, "grpc", core.DefaultGRPC, "address of the gRPC listener, or a port on this host, or off")
	f.StringSliceVar(&cfg.Models, "model", nil, "serve this model only (repeatable; default: all)")
	f.StringVar(&cfg.CertFile, "tls-cert", "", "serve TLS with this certificate (PEM; read again when it changes)")
	f.StringVar(&cfg.KeyFile, "tls-key", "", "and this key")
	f.StringVar(&cfg.ClientCAFile, "client-ca", "", "callers have to show a certificate of these authorities (PEM)")
	f.StringVar(&cfg.TokenFile, "token-file", "", "callers have to show one of these bearer tokens: lines of a name and a token")
	f.BoolVar(&cfg.Insecure, "insecure", false, "serve other hosts without TLS and tokens, behind a proxy or firewall")
	f.BoolVar(&cfg.SystemSharedMemory, "system-shared-memory", false, "callers on this host may pass tensors in POSIX shared memory")
	f.StringSliceVar(&cfg.AllowedHosts, "allowed-host", nil, "a name by which HTTP callers without tokens may address the gateway, "+
		"besides IP addresses and localhost (repeatable; * allows any)")
	f.IntVar(&cfg.MaxMessageBytes, "max-message-bytes", core.DefaultMaxMessageBytes, "largest HTTP body or gRPC message")
	f.IntVar(&cfg.MaxBufferedBytes, "max-buffered-bytes", core.DefaultMaxBufferedBytes, "most bytes of requests in the gateway's memory")
	f.IntVar(&cfg.MaxConnections, "max-connections", core.DefaultMaxConnections, "most connections of each listener")
	f.IntVar(&cfg.CallerConnections, "caller-connections", 0, "most connections of one address at each listener (default: a quarter of "+
		"max_connections)")
	f.IntVar(&cfg.CallerRequests, "caller-requests", core.DefaultCallerRequests, "most requests that one caller has in flight")
	f.IntVar(&cfg.CallerBytes, "caller-bytes", 0, "most bytes of one caller in the gateway's memory (default: a quarter of "+
		"max_buffered_bytes)")
	f.IntVar(&cfg.Window, "window", 0, "slots to ask for, per model; one caller has a quarter (default: 64 MiB worth, at most 512)")
	f.BoolVar(&cfg.ReportLoad, "report-load", false, "send the model's load (ORCA) to every gRPC caller, not only to relays")
	f.DurationVar(&cfg.ClaimWait, "claim-wait", core.DefaultClaimWait, "how long a request without a deadline waits for room in the ring")
	f.DurationVar(&cfg.SequenceIdle, "sequence-idle", core.DefaultSequenceIdle, "how long a sequence may be without a step before it ends")
	f.DurationVar(&cfg.DrainDelay, "drain-delay", 0, "after SIGTERM, how long readiness is false before requests are refused")
	f.DurationVar(&cfg.DrainTime, "drain-time", core.DefaultDrainTime, "and how long accepted requests may take to finish")
	f.StringVar(&cfg.AdminTokenFile, "admin-token-file", "", "settings can be changed on the page (/dashboard) with one of these "+
		"tokens: lines of a name and a token")
	logs = addLogFlags(f)
	if err := parse(f, args, 0, 0); err != nil {
		return cfg, logs, err
	}
	for flag, at := range map[string]string{"http": cfg.HTTP, "grpc": cfg.GRPC} {
		if _, err := strconv.ParseUint(at, 10, 16); err != nil && at != "off" && !strings.Contains(at, ":") {
			return cfg, logs, fmt.Errorf("%w: --%s %s: want a port, HOST:PORT or off", errUsage, flag, at)
		}
	}
	cfg.Socket = *socket
	return cfg, logs, nil
}

// checkGatewayPorts refuses a [gateway] whose ports another process has.
func checkGatewayPorts(workers []supervise.Worker) error {
	for _, w := range workers {
		if w.Name != configfile.Gateway || !w.Client {
			continue
		}
		cfg, _, err := gatewayConfig(w.Command[2:])
		if err != nil {
			return err
		}
		if err := errors.Join(checkPort(cfg.HTTP, "http"), checkPort(cfg.GRPC, "grpc")); err != nil {
			return fmt.Errorf("[gateway]: %w", err)
		}
	}
	return nil
}

// checkGateway refuses a [gateway] that would not start.
func checkGateway(workers []supervise.Worker) error {
	for _, w := range workers {
		if w.Name != configfile.Gateway || !w.Client {
			continue
		}
		cfg, logs, err := gatewayConfig(w.Command[2:])
		if err == nil {
			_, err = logs.handler()
		}
		if err == nil {
			_, err = core.New(cfg)
		}
		if err != nil {
			return fmt.Errorf("[gateway]: %w", err)
		}
	}
	return nil
}

// greet prints the addresses, and a line to try.
func greet(ctx context.Context, cfg *core.Config, web, rpc net.Addr) {
	if rpc != nil {
		fmt.Printf("grpc %s\n", rpc)
	}
	if web == nil {
		return
	}
	fmt.Printf("http %s\n", web)
	scheme, extra := "http", ""
	if cfg.CertFile != "" {
		scheme, extra = "https", " --cacert "+cfg.CertFile
	}
	if cfg.ClientCAFile != "" {
		extra += " --cert CERT --key KEY"
	}
	if cfg.TokenFile != "" {
		extra += " -H 'Authorization: Bearer TOKEN'"
	}
	path, data := "/v2", ""
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	models, err := admin.New(cfg.Socket).Models(ctx)
	if err != nil {
		fmt.Printf("no broker answers yet (%v)\n", err)
	}
	for i := range models {
		if data = example(&models[i].Signature); data != "" {
			path = "/v2/models/" + models[i].Name + "/infer"
			break
		}
	}
	if data != "" {
		data = " -d '" + data + "'"
	}
	fmt.Printf("try: curl%s %s://%s%s%s\n", extra, scheme, web, path, data)
}

// example is a request of one row of zeros, if that is short enough to type.
func example(sig *tensor.Signature) string {
	var inputs []string
	for i := range sig.Inputs {
		spec := &sig.Inputs[i]
		shape, n := []string{"1"}, 1
		for d, size := range oip.WireRow(spec, spec.Shape) {
			if slices.Contains(spec.Variable, d) {
				size = 1
			}
			shape, n = append(shape, fmt.Sprint(size)), n*size
		}
		if n > 64 || oip.TypeName(spec.DType) == "?" { // the gateway refuses it
			return ""
		}
		zero := "0"
		switch spec.DType {
		case tensor.Bool:
			zero = "false"
		case tensor.Str:
			zero = `"text"`
		}
		zeros := strings.TrimSuffix(strings.Repeat(zero+",", n), ",")
		inputs = append(inputs, fmt.Sprintf(`{"name":"%s","datatype":"%s","shape":[%s],"data":[%s]}`, spec.Name, oip.TypeName(spec.DType),
			strings.Join(shape, ","), zeros))
	}
	return `{"inputs":[` + strings.Join(inputs, ",") + `]}`
}
