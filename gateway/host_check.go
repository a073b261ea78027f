// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"net/http"

	"google.golang.org/grpc/codes"

	"github.com/ringbatch/ringbatch/gateway/console"
)

// checkHost refuses names that the gateway does not know itself by, where callers
// need not show who they are. Otherwise a page of another site could reach it
// through a browser here, by a name that it points to this address (DNS rebinding).
func (g *gateCore) checkHost(host string) error {
	if g.cfg.TokenFile != "" || g.cfg.ClientCAFile != "" || console.HostAllowed(host, g.cfg.AllowedHosts) {
		return nil
	}
	return refuse(http.StatusMisdirectedRequest, codes.PermissionDenied, "this gateway is not known as %q: "+console.HostAdvice, host)
}
