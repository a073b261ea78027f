// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"net"
	"testing"

	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/internal/must"
)

func TestATakenPortIsRefusedWithItsFlagBeforeAnyDoorOpens(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must.Do(t, err)
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	for flag, cfg := range map[string]core.Config{"--http": {HTTP: port, GRPC: core.Off}, "--grpc": {HTTP: "127.0.0.1:0", GRPC: port}} {
		cfg.Started = func(net.Addr, net.Addr) { t.Errorf("%s: a door is open", flag) }
		c, err := core.New(cfg)
		must.Do(t, err)
		if err := New(c).Serve(t.Context()); err == nil || err.Error() != "port "+port+" is taken; choose another with "+flag+" PORT" {
			t.Errorf("%s: %v", flag, err)
		}
	}
}
