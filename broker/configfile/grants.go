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

// fileGrant is a table of [[allow]]: permissions of users and groups, by name or number.
type fileGrant struct {
	Users  []any    `toml:"users"`
	Groups []any    `toml:"groups"`
	May    []string `toml:"may"`
}

func (f *fileGrant) parseGrant() (g broker.Grant, err error) {
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

// ParseGrant parses a user, or a group after @, and their permissions: web=infer,
// @ml=infer,serve. Without permissions a user may infer: 1001.
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
	id, err := parseID("user", text)
	if err != nil {
		if u, lookup := user.Lookup(text); lookup == nil {
			return parseID("user", u.Uid)
		}
	}
	return id, err
}

func groupID(text string) (int, error) {
	id, err := parseID("group", text)
	if err != nil {
		if g, lookup := user.LookupGroup(text); lookup == nil {
			return parseID("group", g.Gid)
		}
	}
	return id, err
}

func parseID(what, text string) (int, error) {
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil {
		return 0, fmt.Errorf("%w: %s %q is neither a name nor a number here", status.ErrInvalid, what, text)
	}
	return int(n), nil
}
