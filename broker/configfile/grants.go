// SPDX-License-Identifier: Apache-2.0

package configfile

import (
	"fmt"
	"os/user"
	"strconv"
	"strings"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/status"
)

// fileGrant is a table of [[allow]]: users and groups by name or number, and
// what they may do.
type fileGrant struct {
	Users  []any    `toml:"users"`
	Groups []any    `toml:"groups"`
	May    []string `toml:"may"`
}

func (f *fileGrant) grant() (g broker.Grant, err error) {
	if len(f.Users) == 0 && len(f.Groups) == 0 {
		return g, fmt.Errorf("%w: name users or groups", status.ErrInvalid)
	}
	for _, u := range f.Users {
		uid, err := userID(fmt.Sprint(u))
		if err != nil {
			return g, err
		}
		g.UIDs = append(g.UIDs, uid)
	}
	for _, u := range f.Groups {
		gid, err := groupID(fmt.Sprint(u))
		if err != nil {
			return g, err
		}
		g.GIDs = append(g.GIDs, gid)
	}
	g.May, err = broker.ParsePermissions(f.May)
	return g, err
}

// ParseGrant reads a user, or a group after @, and what they may do:
// web=infer, @ml=infer,serve, or only 1001, who then may infer.
func ParseGrant(text string) (g broker.Grant, err error) {
	who, may, given := strings.Cut(text, "=")
	if !given {
		may = "infer"
	}
	if g.May, err = broker.ParsePermissions(strings.Split(may, ",")); err != nil {
		return g, err
	}
	if group, is := strings.CutPrefix(who, "@"); is {
		gid, err := groupID(group)
		g.GIDs = []int{gid}
		return g, err
	}
	uid, err := userID(who)
	g.UIDs = []int{uid}
	return g, err
}

func userID(text string) (int, error) {
	return number(text, "user", func(name string) (string, error) {
		u, err := user.Lookup(name)
		if err != nil {
			return "", err
		}
		return u.Uid, nil
	})
}

func groupID(text string) (int, error) {
	return number(text, "group", func(name string) (string, error) {
		g, err := user.LookupGroup(name)
		if err != nil {
			return "", err
		}
		return g.Gid, nil
	})
}

// number is a user's or a group's, given as such or by name.
func number(text, what string, lookup func(string) (string, error)) (int, error) {
	if n, err := strconv.ParseUint(text, 10, 32); err == nil {
		return int(n), nil
	}
	found, err := lookup(text)
	if err != nil {
		return 0, fmt.Errorf("%w: %s %q: %v", status.ErrInvalid, what, text, err)
	}
	n, err := strconv.ParseUint(found, 10, 32)
	return int(n), err
}
