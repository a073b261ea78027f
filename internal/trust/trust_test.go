// SPDX-License-Identifier: Apache-2.0

package trust

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
)

// folder has a file "m" in it; both are this user's alone.
func folder(t *testing.T) (string, string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "models")
	file := filepath.Join(dir, "m")
	must.Do(t, errors.Join(os.Mkdir(dir, 0o755), os.WriteFile(file, []byte("weights"), 0o644)))
	return dir, file
}

func TestAFileOfThisUserIsOpened(t *testing.T) {
	dir, file := folder(t)
	link := filepath.Join(dir, "link")
	must.Do(t, errors.Join(os.Symlink("../models/./m", link), os.Chmod(dir, 0o1777|os.ModeSticky)))
	t.Chdir(dir)
	for _, path := range []string{file, link, "m", "link", "../models/link", dir + "//m"} {
		f, err := Open(path)
		if err != nil {
			t.Errorf("%s: %v", path, err)
			continue
		}
		if got, err := io.ReadAll(f); err != nil || string(got) != "weights" {
			t.Errorf("%s: read %q, %v", path, got, err)
		}
		f.Close()
	}
	if _, err := Open(filepath.Join(dir, "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file that is not there: %v", err)
	}
}

func TestAFileThatOthersMayWriteIsRefused(t *testing.T) {
	for name, spoil := range map[string]func(dir, file string) error{
		"everybody, the file":       func(_, file string) error { return os.Chmod(file, 0o646) },
		"everybody, its folder":     func(dir, _ string) error { return os.Chmod(dir, 0o777) },
		"everybody, a folder above": func(dir, _ string) error { return os.Chmod(filepath.Dir(dir), 0o777) },
		"a group, the file":         func(_, file string) error { return errors.Join(os.Chown(file, -1, 4321), os.Chmod(file, 0o664)) },
		"a group, its folder":       func(dir, _ string) error { return errors.Join(os.Chown(dir, -1, 4321), os.Chmod(dir, 0o775)) },
		"the owner of the file":     func(_, file string) error { return os.Chown(file, 4321, -1) },
		"the owner of its folder":   func(dir, _ string) error { return os.Chown(dir, 4321, -1) },
	} {
		t.Run(name, func(t *testing.T) {
			dir, file := folder(t)
			if err := spoil(dir, file); errors.Is(err, os.ErrPermission) {
				t.Skip("only root gives files away")
			} else if err != nil {
				t.Fatal(err)
			}
			link := filepath.Join(t.TempDir(), "link")
			must.Do(t, os.Symlink(file, link))
			for _, path := range []string{file, link} {
				if _, err := Open(path); !errors.Is(err, ErrOthers) {
					t.Errorf("Open: %v", err)
				}
			}
		})
	}
}

func TestALinkOfAnotherUserIsRefused(t *testing.T) {
	_, file := folder(t)
	link := filepath.Join(t.TempDir(), "link")
	must.Do(t, os.Symlink(file, link))
	if err := os.Lchown(link, 4321, -1); err != nil {
		t.Skip("only root gives files away")
	}
	if _, err := Open(link); !errors.Is(err, ErrOthers) {
		t.Errorf("Open: %v", err)
	}
}
