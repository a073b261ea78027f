// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/status"
)

// Permissions of a user. The broker's own user has all of them.
type Permissions uint8

// A user with any permission may also call ping, models, watch and stats.
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

// ParsePermissions parses infer, serve and administer.
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

// Grant gives permissions to users, and to the members of groups.
type Grant struct {
	UIDs []int
	GIDs []int
	May  Permissions
}

func (c *Config) isShared() bool { return len(c.AllowedUIDs) > 0 || len(c.Grants) > 0 }

func (b *Broker) permissionsOf(c *net.UnixConn, cred *unix.Ucred) Permissions {
	uid := int(cred.Uid)
	if uid == os.Getuid() {
		return mayAll
	}
	var p Permissions
	if slices.Contains(b.cfg.AllowedUIDs, uid) {
		p = MayInfer
	}
	var groups []int // read once, if a grant is for groups
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

// soPeerGroups is SO_PEERGROUPS: the peer's supplementary groups when it connected.
const soPeerGroups = 59

func peerGroups(c *net.UnixConn) (groups []int) {
	_ = withFD(c, func(fd int) error {
		for text := getsockopt(fd, unix.SOL_SOCKET, soPeerGroups); len(text) >= 4; text = text[4:] {
			groups = append(groups, int(binary.NativeEndian.Uint32(text)))
		}
		return nil
	})
	return groups
}

func withFD(c *net.UnixConn, f func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) { err = f(int(fd)) })
	return errors.Join(cerr, err)
}

// neededPermission is the permission for a request; any of them for most.
func neededPermission(op control.Op) Permissions {
	switch op {
	case control.OpClient:
		return MayInfer
	case control.OpWorker, control.OpWeights:
		return MayServe
	case control.OpSet, control.OpRestart, control.OpScale, control.OpSleep, control.OpWake, control.OpAlias, control.OpHandOver, control.OpTrace,
		control.OpWithdraw:
		return MayAdminister
	}
	return mayAll
}

// checkPermission refuses a request, and names the option that would permit it.
func checkPermission(uid uint32, has Permissions, op control.Op) error {
	missing := neededPermission(op)
	if has&missing != 0 {
		return nil
	}
	return fmt.Errorf("%w: uid %d may %s, and %q takes the permission to %s; "+
		"the broker gives it with --allow %d=%s, or [[allow]] in its configuration",
		status.ErrForbidden, uid, has, op, missing, uid, missing)
}
