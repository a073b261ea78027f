// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"fmt"
	"net"
	"net/netip"
	"strings"

	"google.golang.org/grpc/resolver"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/status"
)

// onlyThisHost reports whether the target is a list of loopback addresses.
func (c *Config) onlyThisHost() bool {
	for _, address := range c.list() {
		host, _, err := net.SplitHostPort(address)
		if ip := net.ParseIP(host); err != nil || host != "localhost" && (ip == nil || !ip.IsLoopback()) {
			return false
		}
	}
	return len(c.list()) > 0
}

// list returns the target's addresses; nil if the target is another kind of gRPC's.
func (c *Config) list() []string {
	if scheme, rest := c.scheme(); strings.HasPrefix(rest, "//") || strings.HasPrefix(scheme, "unix") && resolver.Get(scheme) != nil ||
		strings.Contains(rest, ":") && resolver.Get(scheme) != nil { // dns:8001 is a host of that name, dns:host:8001 a target
		return nil
	}
	var all []string
	for _, address := range strings.Split(c.Target, ",") {
		if address = strings.TrimSpace(address); address != "" {
			all = append(all, address)
		}
	}
	return all
}

// scheme splits the target at its first colon. As in gRPC, case does not matter.
func (c *Config) scheme() (scheme, rest string) {
	scheme, rest, _ = strings.Cut(c.Target, ":")
	return strings.ToLower(scheme), rest
}

// checkAddresses refuses URLs, and addresses without a port. gRPC would keep trying
// port 443 for some of them.
func (c *Config) checkAddresses() error {
	if scheme, rest, given := strings.Cut(strings.ToLower(c.Target), "://"); given && resolver.Get(scheme) == nil { // http, grpc, …
		host, _, _ := strings.Cut(strings.TrimPrefix(rest, "/"), "/")
		return fmt.Errorf("%w: %q is no target of gRPC's, which are HOST:PORT, dns:///HOST:PORT or unix:PATH: is it %s? (with --tls if "+
			"that serves TLS)", status.ErrInvalid, c.Target, host)
	}
	addresses := c.list()
	if scheme, name := c.scheme(); scheme == "dns" && addresses == nil {
		if afterServer, given := strings.CutPrefix(name, "//"); given {
			_, name, _ = strings.Cut(afterServer, "/")
		}
		addresses = []string{name}
	}
	_, usual, _ := net.SplitHostPort(oip.DefaultGRPC)
	for _, address := range addresses {
		host, port, err := net.SplitHostPort(address)
		if err != nil {
			host, port = strings.Trim(address, "[]"), ""
			if _, err := netip.ParseAddr(host); strings.Contains(host, ":") && err != nil {
				return fmt.Errorf("%w: %q is no target of gRPC's here, which are HOST:PORT, dns:///HOST:PORT or unix:PATH",
					status.ErrInvalid, address)
			}
		}
		if _, err = net.LookupPort("tcp", port); err != nil || port == "" || port == "0" {
			return fmt.Errorf("%w: %q names no port: is it %s? (%s is a gateway's gRPC port, unless --grpc says otherwise there)",
				status.ErrInvalid, address, net.JoinHostPort(host, usual), usual)
		}
	}
	return nil
}
