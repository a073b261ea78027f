// SPDX-License-Identifier: Apache-2.0

// Package console serves an operator's view of a broker over HTTP: /metrics for
// Prometheus, and a page at /dashboard. A gateway serves it on its port, and
// `ringbatch dashboard` alone.
//
// The console is a client of the broker (package admin). It keeps no state, and
// asks the broker for each request.
package console

import (
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"

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

// HostAdvice says how to allow a refused name.
const HostAdvice = "use an IP address or localhost, or allow the name with --allowed-host"

// HostAllowed reports whether a request's Host is an IP address, localhost, or
// one of the names; the name * allows every host. Another site may point any
// other name to this address (DNS rebinding).
func HostAllowed(host string, names []string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	host = strings.ToLower(strings.TrimSuffix(strings.Trim(host, "[]"), "."))
	if _, err := netip.ParseAddr(host); err == nil || host == "localhost" || host == "" { // HTTP/1.0 has none
		return true
	}
	return slices.ContainsFunc(names, func(name string) bool { return name == "*" || strings.EqualFold(name, host) })
}

// CheckHost refuses requests to names that are not allowed.
func CheckHost(next http.Handler, names []string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !HostAllowed(r.Host, names) {
			http.Error(w, "this page is not known as "+r.Host+": "+HostAdvice, http.StatusMisdirectedRequest)
			return
		}
		next.ServeHTTP(w, r)
	})
}
