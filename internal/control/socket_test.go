// SPDX-License-Identifier: Apache-2.0

package control

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
)

func TestAFallbackFolderOfSomebodyElseIsNotTrusted(t *testing.T) {
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	t.Setenv("XDG_RUNTIME_DIR", "")
	t.Setenv(SocketEnv, "")
	path := SocketPath("")
	dir := filepath.Dir(path)
	if filepath.Dir(dir) != tmp {
		t.Fatalf("the fallback is %s", path)
	}
	ok := func(what, path string) {
		t.Helper()
		if err := CheckFolder(path); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	refused := func(what string) {
		t.Helper()
		if CheckFolder(path) == nil {
			t.Errorf("%s is trusted", what)
		}
	}
	ok("no folder yet", path)
	must.Do(t, os.Symlink(tmp, dir))
	refused("a link to somewhere else")
	_ = os.Remove(dir)
	must.Do(t, os.Mkdir(dir, 0o700))
	ok("its own folder", path)
	if os.Getuid() == 0 {
		must.Do(t, os.Chown(dir, 12345, 12345))
		refused("a folder of another user")
	}
	ok("a folder that was chosen", "/run/somebody/broker.sock")
}
