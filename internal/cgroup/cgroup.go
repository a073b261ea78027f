// SPDX-License-Identifier: Apache-2.0

// Package cgroup measures how much memory the control groups of this process have left.
// At the limit the kernel does not refuse memory: it kills a process of the group. So
// callers check before they allocate.
//
// Versions 1 and 2 are read, even side by side. A limit binds all groups below it, so
// every group from that of the process up to the mounted root counts.
package cgroup

import (
	"math"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
)

// Room is the memory that a group has left.
type Room struct {
	Group string // its folder
	Limit int64  // bytes
	// Left is the free part of Limit. Cached pages of files count as free: the kernel
	// drops them before it kills. Swap does not count: a ring in swap is useless.
	Left int64
}

// Tightest is the group of this process, or above it, with the least room. It returns
// false if no group has a limit.
func Tightest() (Room, bool) { return tightest("") }

// tightest reads files below root, which tests choose.
func tightest(root string) (best Room, limited bool) {
	groups := read(root + "/proc/self/cgroup")
	for line := range strings.Lines(read(root + "/proc/self/mountinfo")) {
		m, ok := parseMount(line)
		if !ok {
			continue
		}
		dir, ok := m.folder(groups)
		if !ok {
			continue
		}
		for {
			if room, ok := m.kind.room(root + dir); ok && (!limited || room.Left < best.Left) {
				room.Group = dir
				best, limited = room, true
			}
			if len(dir) <= len(m.point) {
				break
			}
			dir = path.Dir(dir)
		}
	}
	return best, limited
}

// mount is a line of mountinfo about a hierarchy that may limit memory.
type mount struct {
	kind  *kind
	root  string // the mounted group
	point string // the mount point
}

// parseMount reads
//
//	36 35 98:0 /root /point rw,noatime master:1 - cgroup cgroup rw,memory
func parseMount(line string) (m mount, ok bool) {
	before, after, _ := strings.Cut(line, " - ")
	where, what := strings.Fields(before), strings.Fields(after)
	if len(where) < 5 || len(what) < 3 {
		return m, false
	}
	m.root, m.point = unescape(where[3]), unescape(where[4])
	switch {
	case what[0] == "cgroup2":
		m.kind = &version2
	case what[0] == "cgroup" && has(what[2], "memory"):
		m.kind = &version1
	}
	return m, m.kind != nil
}

// folder is the folder of this process's group. In a container, the process's group is
// the root of the mount.
func (m mount) folder(groups string) (string, bool) {
	for line := range strings.Lines(groups) {
		parts := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3) // hierarchy:controllers:path
		if len(parts) != 3 || !m.kind.mine(parts[0], parts[1]) {
			continue
		}
		below := strings.TrimPrefix(parts[2], strings.TrimSuffix(m.root, "/"))
		if strings.HasPrefix(below, "/..") { // the group is outside of the mount
			below = ""
		}
		return path.Join(m.point, below), true
	}
	return "", false
}

// kind names the files of a version of control groups.
type kind struct {
	mine   func(hierarchy, controllers string) bool
	limits []string // files; the lowest counts
	used   string
	idle   []string // lines of memory.stat that count as free
}

var version1 = kind{
	mine:   func(_, controllers string) bool { return has(controllers, "memory") },
	limits: []string{"memory.limit_in_bytes"},
	used:   "memory.usage_in_bytes",
	idle:   []string{"total_inactive_file", "total_active_file"},
}

var version2 = kind{
	mine: func(hierarchy, controllers string) bool { return hierarchy == "0" && controllers == "" },
	// Above memory.high the kernel slows processes down instead of killing them.
	limits: []string{"memory.max", "memory.high"},
	used:   "memory.current",
	idle:   []string{"inactive_file", "active_file"},
}

// room reads the files of one group. It returns false if the group has no limit.
func (k *kind) room(dir string) (r Room, ok bool) {
	r.Limit = unlimited
	for _, name := range k.limits {
		if n, err := strconv.ParseInt(strings.TrimSpace(read(dir+"/"+name)), 10, 64); err == nil { // "max" is no number
			r.Limit = min(r.Limit, n)
		}
	}
	if r.Limit >= unlimited {
		return r, false
	}
	used, err := strconv.ParseInt(strings.TrimSpace(read(dir+"/"+k.used)), 10, 64)
	if err != nil {
		return r, false
	}
	for line := range strings.Lines(read(dir + "/memory.stat")) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		for _, idle := range k.idle {
			if n, err := strconv.ParseInt(value, 10, 64); name == idle && err == nil {
				used -= n
			}
		}
	}
	r.Left = max(0, r.Limit-max(0, used))
	return r, true
}

// unlimited is about the number that version 1 writes for no limit.
const unlimited = math.MaxInt64 - 1<<20

func has(list, name string) bool { return slices.Contains(strings.Split(list, ","), name) }

// unescape turns \040 into a blank, the one character that matters in a path.
func unescape(s string) string { return strings.ReplaceAll(s, `\040`, " ") }

// read is a file's text, empty if it cannot be read.
func read(name string) string {
	text, err := os.ReadFile(name)
	if err != nil {
		return ""
	}
	return string(text)
}
