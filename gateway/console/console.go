// SPDX-License-Identifier: Apache-2.0

// Package console serves an operator's view of a broker over HTTP: /metrics for
// Prometheus, and a page at /dashboard. A gateway serves it on its port, and
// `ringbatch dashboard` alone.
//
// The console is a client of the broker (package admin). It keeps no state, and
// asks the broker for each request.
package console

import (
	"net/http"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/ringbatch/ringbatch/admin"
)

// Config is how a console runs.
type Config struct {
	Socket string // the broker's; default as everywhere
	// Changes on the page need a token of this file, which has lines of a name and a
	// token. Without the file the page is read-only.
	AdminTokenFile string
	More           []prometheus.Collector // also at /metrics
}

// New makes the console.
func New(cfg Config) http.Handler {
	mux := http.NewServeMux()
	a := admin.New(cfg.Socket)
	mux.Handle("GET /metrics", metricsHandler(a, cfg.More...))
	(&api{admin: a, tokenFile: cfg.AdminTokenFile}).register(mux)
	return mux
}
