// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"context"

	"google.golang.org/grpc/stats"
)

// An xds:/// target has a balancer of its own: the control plane says where the
// hosts are, how well they are, and by which rule they are chosen. For the relay
// all of them are one host, as if a proxy stood before them.

// addBalanced knows such a target. Whether it can be reached its checks tell.
func (p *hosts) addBalanced(target string) {
	h := p.add(target)
	h.balanced = true
	h.connected(nil)
}

// sentHandler notes which calls may have reached a host: there is no picker of
// ours that hears of it.
type sentHandler struct{}

func (sentHandler) HandleRPC(ctx context.Context, s stats.RPCStats) {
	if _, ok := s.(*stats.OutPayload); !ok {
		return
	}
	if r, ok := ctx.Value(routeKey{}).(*route); ok {
		r.sent.Store(true)
	}
}

func (sentHandler) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context   { return ctx }
func (sentHandler) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }
func (sentHandler) HandleConn(context.Context, stats.ConnStats)                       {}
