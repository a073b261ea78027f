// SPDX-License-Identifier: Apache-2.0

package core

import (
	"net/http"

	"google.golang.org/grpc/codes"

	"github.com/ringbatch/ringbatch/gateway/console"
)

// CheckHost refuses names that the gateway does not know itself by, where callers
// need not show who they are. Otherwise a page of another site could reach it
// through a browser here, by a name that it points to this address (DNS rebinding).
func (g *Gateway) CheckHost(host string) error {
	if g.Cfg.TokenFile != "" || g.Cfg.ClientCAFile != "" || console.HostAllowed(host, g.Cfg.AllowedHosts) {
		return nil
	}
	return Refuse(http.StatusMisdirectedRequest, codes.PermissionDenied, "this gateway is not known as %q: "+console.HostAdvice, host)
}
