// SPDX-License-Identifier: Apache-2.0

package console

import (
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
)

// HostAdvice says how to allow a refused name.
const HostAdvice = "use an IP address or localhost, or allow the name with --allowed_host"

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
