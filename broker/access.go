// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/status"
)

// Permissions are what a user may do. The broker's own user may do everything.
type Permissions uint8

// The permissions. A user who has one of them may also ask who is there and how
// they fare (ping, models, watch, stats).
const (
	MayInfer      Permissions = 1 << iota // attach as a client
	MayServe                              // attach as a worker, declare models
	MayAdminister                         // change policies and worker processes

	mayAll = MayInfer | MayServe | MayAdminister
)

// permissionNames in the order of their bits.
var permissionNames = []string{"infer", "serve", "administer"}

func (p Permissions) String() string {
	var names []string
	for i, name := range permissionNames {
		if p&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	if names == nil {
		return "nothing"
	}
	return strings.Join(names, ", ")
}

// ParsePermissions reads infer, serve and administer.
func ParsePermissions(names []string) (p Permissions, err error) {
	for _, name := range names {
		i := slices.Index(permissionNames, strings.TrimSpace(name))
		if i < 0 {
			return 0, fmt.Errorf("%w: unknown permission %q; there are %s", status.ErrInvalid, name, strings.Join(permissionNames, ", "))
		}
		p |= 1 << i
	}
	if p == 0 {
		return 0, fmt.Errorf("%w: no permission is named; there are %s", status.ErrInvalid, strings.Join(permissionNames, ", "))
	}
	return p, nil
}

// Grant lets users, and the members of groups, do something.
type Grant struct {
	UIDs []int
	GIDs []int
	May  Permissions
}

// shared says that others than the broker's own user may connect.
func (c *Config) shared() bool { return len(c.AllowedUIDs) > 0 || len(c.Grants) > 0 }

// permissions of the process at the other end of a connection.
func (b *Broker) permissions(c *net.UnixConn, cred *unix.Ucred) Permissions {
	uid := int(cred.Uid)
	if uid == os.Getuid() {
		return mayAll
	}
	var p Permissions
	if slices.Contains(b.cfg.AllowedUIDs, uid) {
		p = MayInfer
	}
	var groups []int // asked for once, and only if some grant is for groups
	for _, g := range b.cfg.Grants {
		if len(g.GIDs) > 0 && groups == nil {
			groups = append(peerGroups(c), int(cred.Gid))
		}
		if slices.Contains(g.UIDs, uid) || slices.ContainsFunc(g.GIDs, func(gid int) bool { return slices.Contains(groups, gid) }) {
			p |= g.May
		}
	}
	return p
}

// soPeerGroups is SO_PEERGROUPS: the supplementary groups that the peer had
// when it connected.
const soPeerGroups = 59

func peerGroups(c *net.UnixConn) (groups []int) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil
	}
	_ = raw.Control(func(fd uintptr) {
		for text := getsockopt(int(fd), unix.SOL_SOCKET, soPeerGroups); len(text) >= 4; text = text[4:] {
			groups = append(groups, int(binary.NativeEndian.Uint32(text)))
		}
	})
	return groups
}

// needs is the permission that a request takes.
func needs(op control.Op) Permissions {
	switch op {
	case control.OpClient:
		return MayInfer
	case control.OpWorker:
		return MayServe
	case control.OpSet, control.OpRestart, control.OpScale, control.OpAlias, control.OpHandOver, control.OpTrace:
		return MayAdminister
	}
	return mayAll // any of them will do
}

// permit refuses what a user may not do, and says how it may be allowed to.
func permit(uid uint32, has Permissions, op control.Op) error {
	missing := needs(op)
	if has&missing != 0 {
		return nil
	}
	return fmt.Errorf("%w: uid %d may %s, and %q takes the permission to %s; the broker gives it with --allow %d=%s, or [[allow]] in its configuration",
		status.ErrForbidden, uid, has, op, missing, uid, missing)
}
