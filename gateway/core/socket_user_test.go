// SPDX-License-Identifier: Apache-2.0

package core

import (
	"io"
	"net"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
)

// A socket that its owner has closed is listed as root's.
func TestACallerThatHungUpIsNobody(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must.Do(t, err)
	defer l.Close()
	theirs, err := net.Dial("tcp", l.Addr().String())
	must.Do(t, err)
	ours, err := l.Accept()
	must.Do(t, err)
	defer ours.Close()
	local, remote := addrPort(ours.LocalAddr()), addrPort(ours.RemoteAddr())
	if _, err := socketUser(remote, local); err != nil {
		t.Fatalf("a caller that is there: %v", err)
	}
	theirs.Close()
	_, _ = io.ReadAll(ours) // it is closed when this ends
	if uid, err := socketUser(remote, local); err == nil {
		t.Errorf("a caller that has hung up is user %d", uid)
	}
}
