// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"syscall"
	"time"

	"github.com/ringbatch/ringbatch/gateway/console"
)

func runDashboard(ctx context.Context, args []string) error {
	f := flags("dashboard", "", `Serve a page that shows the broker at work, and /metrics, on this host only. A gateway has both on
its own port. From another host: ssh -L 8002:127.0.0.1:8002 HOST`, `  ringbatch dashboard
  ringbatch dashboard --http 9000 --admin-token-file tokens
`)
	socket := socketFlag(f)
	port := f.Uint16("http", 8002, "`PORT`; 0: any free port")
	hosts := f.StringSlice("allowed-host", nil, "a name by which the page may be addressed, besides IP addresses and localhost "+
		"(repeatable; * allows any)")
	tokens := f.String("admin-token-file", "", "settings can be changed on the page with one of these tokens: lines of a name and a token")
	if err := parse(f, args, 0, 0); err != nil {
		return err
	}
	l, err := listenHere(*port)
	if err != nil {
		return err
	}
	fmt.Printf("http://%s/dashboard\n", l.Addr())
	return serveConsole(ctx, l, *socket, *tokens, *hosts)
}

// listenHere listens on a port of this host only.
func listenHere(port uint16) (net.Listener, error) {
	l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, portTaken(fmt.Sprint(port), "http")
	}
	return l, err
}

func portTaken(port, flag string) error {
	return fmt.Errorf("port %s is taken; choose another with --%s PORT", port, flag)
}

// consoleHandler serves the page and /metrics. The root leads to the page.
func consoleHandler(cfg console.Config) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/", console.New(cfg))
	mux.Handle("GET /{$}", http.RedirectHandler("/dashboard", http.StatusFound))
	return mux
}

// serveConsole serves the page until ctx ends.
func serveConsole(ctx context.Context, l net.Listener, socket, tokens string, hosts []string) error {
	handler := consoleHandler(console.Config{Socket: socket, AdminTokenFile: tokens})
	s := &http.Server{
		Handler: console.CheckHost(handler, hosts), ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute,
		MaxHeaderBytes: 64 << 10,
	}
	context.AfterFunc(ctx, func() { _ = s.Close() })
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
