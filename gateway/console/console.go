// SPDX-License-Identifier: Apache-2.0

// Package console is what an operator sees of a broker over HTTP: numbers for
// Prometheus at /metrics, and a page at /dashboard. A gateway has it on its
// port; `ringbatch dashboard` serves it alone.
//
// It is a client of the broker like any other (package admin), and keeps
// nothing: all of it is asked for when somebody looks.
package console

import (
	"net/http"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/ringbatch/ringbatch/admin"
)

// Config is how a console runs.
type Config struct {
	Socket string // the broker's; default as everywhere
	// Changes on the page take one of the tokens of this file, lines of a name
	// and a token. Without it the page is for reading only.
	AdminTokenFile string
	More           []prometheus.Collector // told at /metrics too
}

// New makes the console.
func New(cfg Config) http.Handler {
	mux := http.NewServeMux()
	a := admin.New(cfg.Socket)
	mux.Handle("GET /metrics", metricsHandler(a, cfg.More...))
	(&api{admin: a, tokenFile: cfg.AdminTokenFile}).register(mux)
	return mux
}
