// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
)

const mib = 1 << 20

// machine is a tree of files as a process would see it.
type machine map[string]string

func (m machine) tightest(t *testing.T) (Room, bool) {
	t.Helper()
	root := t.TempDir()
	for name, text := range m {
		name = filepath.Join(root, name)
		must.Do(t, os.MkdirAll(filepath.Dir(name), 0o755))
		must.Do(t, os.WriteFile(name, []byte(text), 0o644))
	}
	return tightest(root)
}

const (
	v1Mounts = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n" +
		"32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n" +
		"35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n" +
		"41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
	v1None = "9223372036854771712\n"

	v2Mounts = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n"
)

func TestRoomIsWhatTheTightestGroupLeaves(t *testing.T) {
	for what, c := range map[string]struct {
		machine machine
		want    Room // none if Limit is 0
	}{
		"version 1, no limit": {machine{
			"/proc/self/cgroup": "4:memory:/job\n1:cpu:/\n0::/\n", "/proc/self/mountinfo": v1Mounts,
			"/sys/fs/cgroup/memory/memory.limit_in_bytes": v1None, "/sys/fs/cgroup/memory/memory.usage_in_bytes": "1256763392\n",
			"/sys/fs/cgroup/memory/job/memory.limit_in_bytes": v1None, "/sys/fs/cgroup/memory/job/memory.usage_in_bytes": "13463552\n",
		}, Room{}},
		"version 1, its own limit, files' pages do not count": {machine{
			"/proc/self/cgroup": "4:cpu,memory:/job\n", "/proc/self/mountinfo": v1Mounts,
			"/sys/fs/cgroup/memory/job/memory.limit_in_bytes": "104857600\n",
			"/sys/fs/cgroup/memory/job/memory.usage_in_bytes": "62914560\n",
			"/sys/fs/cgroup/memory/job/memory.stat":           "inactive_file 1\ntotal_inactive_file 10485760\ntotal_active_file 1048576\n",
		}, Room{"/sys/fs/cgroup/memory/job", 100 * mib, (100 - 60 + 11) * mib}},
		"version 1, an outer group is tighter": {machine{
			"/proc/self/cgroup": "4:memory:/outer/job\n", "/proc/self/mountinfo": v1Mounts,
			"/sys/fs/cgroup/memory/outer/job/memory.limit_in_bytes": "104857600\n",
			"/sys/fs/cgroup/memory/outer/job/memory.usage_in_bytes": "0\n",
			"/sys/fs/cgroup/memory/outer/memory.limit_in_bytes":     "209715200\n",
			"/sys/fs/cgroup/memory/outer/memory.usage_in_bytes":     "199229440\n",
		}, Room{"/sys/fs/cgroup/memory/outer", 200 * mib, 10 * mib}},
		"version 1 in a container that sees its group as the root": {machine{
			"/proc/self/cgroup":                           "4:memory:/docker/3f9a\n",
			"/proc/self/mountinfo":                        "35 31 0:32 /docker/3f9a /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
			"/sys/fs/cgroup/memory/memory.limit_in_bytes": "104857600\n", "/sys/fs/cgroup/memory/memory.usage_in_bytes": "1048576\n",
		}, Room{"/sys/fs/cgroup/memory", 100 * mib, 99 * mib}},
		"version 2, no limit": {machine{
			"/proc/self/cgroup": "0::/user.slice\n", "/proc/self/mountinfo": v2Mounts,
			"/sys/fs/cgroup/user.slice/memory.max": "max\n", "/sys/fs/cgroup/user.slice/memory.high": "max\n",
			"/sys/fs/cgroup/user.slice/memory.current": "1048576\n",
		}, Room{}},
		"version 2, memory.high is a limit too": {machine{
			"/proc/self/cgroup": "0::/a/b\n", "/proc/self/mountinfo": v2Mounts,
			"/sys/fs/cgroup/a/b/memory.max": "max\n", "/sys/fs/cgroup/a/b/memory.current": "1048576\n",
			"/sys/fs/cgroup/a/memory.max": "104857600\n", "/sys/fs/cgroup/a/memory.high": "52428800\n",
			"/sys/fs/cgroup/a/memory.current": "11534336\n",
			"/sys/fs/cgroup/a/memory.stat":    "anon 3\nfile 9\nactive_file 1048576\ninactive_file 0\n",
		}, Room{"/sys/fs/cgroup/a", 50 * mib, 40 * mib}},
		"version 2 in a container": {machine{
			"/proc/self/cgroup": "0::/\n", "/proc/self/mountinfo": v2Mounts,
			"/sys/fs/cgroup/memory.max": "104857600\n", "/sys/fs/cgroup/memory.current": "104857601\n",
		}, Room{"/sys/fs/cgroup", 100 * mib, 0}},
		"moved out of what it sees": {machine{
			"/proc/self/cgroup": "0::/../other\n", "/proc/self/mountinfo": v2Mounts,
			"/sys/fs/cgroup/memory.max": "104857600\n", "/sys/fs/cgroup/memory.current": "0\n",
		}, Room{"/sys/fs/cgroup", 100 * mib, 100 * mib}},
		"a mount point with a blank": {machine{
			"/proc/self/cgroup": "0::/job\n", "/proc/self/mountinfo": `30 23 0:26 / /my\040groups rw - cgroup2 none rw` + "\n",
			"/my groups/job/memory.max": "104857600\n", "/my groups/job/memory.current": "0\n",
		}, Room{"/my groups/job", 100 * mib, 100 * mib}},
		"damaged files limit nothing": {machine{
			"/proc/self/cgroup": "\n::\n4:memory\n4:memory:/job\n", "/proc/self/mountinfo": v1Mounts + "35 31\n - - -\n",
			"/sys/fs/cgroup/memory/job/memory.limit_in_bytes": "many\n",
		}, Room{}},
		"no control groups": {machine{}, Room{}},
	} {
		got, limited := c.machine.tightest(t)
		if got.Limit >= unlimited {
			got = Room{}
		}
		if got != c.want || limited != (c.want.Limit != 0) {
			t.Errorf("%s: %+v %v, expected %+v", what, got, limited, c.want)
		}
	}
}

func TestThisProcessIsRead(t *testing.T) {
	room, limited := Tightest()
	if limited && (room.Limit <= 0 || room.Left < 0 || room.Left > room.Limit || room.Group == "") {
		t.Errorf("%+v", room)
	}
}

func BenchmarkTightest(b *testing.B) {
	for b.Loop() {
		Tightest()
	}
}
