// SPDX-License-Identifier: Apache-2.0

// Package trust opens model files that no other user can have written.
//
// The file, and every folder and link that leads to it, belong to this user or
// to root, and no others may write them. python/ringbatch/worker/trust.py does the
// same for Python.
package trust

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// ErrOthers matches the errors for files that another user may have written.
var ErrOthers = errors.New("another user may have written it")

const mostLinks = 40 // as in the kernel

// Open opens a file and checks who may have written it. Callers read from the
// file: its name may lead elsewhere by then.
func Open(path string) (*os.File, error) {
	if err := checkWay(path); err != nil {
		return nil, err
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	about, err := f.Stat()
	if err == nil {
		err = checkEntry(path, about)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// checkWay checks every folder and link that leads to a file, and the file.
func checkWay(path string) error {
	at, todo := "/", strings.Split(path, "/")
	if !filepath.IsAbs(path) {
		folder, err := os.Getwd()
		if err != nil {
			return err
		}
		todo = append(strings.Split(folder, "/"), todo...)
	}
	for links := 0; len(todo) > 0; {
		name := todo[0]
		todo = todo[1:]
		entry := filepath.Join(at, name) // without a name the folder itself; at has no links
		about, err := os.Lstat(entry)
		if err != nil {
			return err
		}
		if err := checkEntry(entry, about); err != nil {
			return err
		}
		if about.Mode()&os.ModeSymlink == 0 {
			at = entry
			continue
		}
		if links++; links > mostLinks {
			return fmt.Errorf("%s: %w", path, syscall.ELOOP)
		}
		target, err := os.Readlink(entry)
		if err != nil {
			return err
		}
		if filepath.IsAbs(target) {
			at = "/"
		}
		todo = append(strings.Split(target, "/"), todo...)
	}
	return nil
}

// checkEntry checks one file, folder or link. Of a folder with the sticky bit,
// such as /tmp, users cannot take away the entries of others.
func checkEntry(entry string, about os.FileInfo) error {
	st, mode := about.Sys().(*syscall.Stat_t), about.Mode()
	if st.Uid != 0 && int(st.Uid) != os.Geteuid() {
		return fmt.Errorf("%w: %s belongs to uid %d, and model files to this user or to root", ErrOthers, entry, st.Uid)
	}
	if mode&os.ModeSymlink != 0 || mode.IsDir() && mode&os.ModeSticky != 0 {
		return nil
	}
	if mode.Perm()&0o002 != 0 {
		return fmt.Errorf("%w: everybody may write %s: chmod o-w %s", ErrOthers, entry, entry)
	}
	if mode.Perm()&0o020 != 0 && !isOwnGroup(int(st.Gid)) {
		return fmt.Errorf("%w: everybody in group %d may write %s: chmod g-w %s", ErrOthers, st.Gid, entry, entry)
	}
	return nil
}

// isOwnGroup reports whether a group has the name of this user, as the group
// that many systems make for each user. In a container it may have no name.
func isOwnGroup(gid int) bool {
	groups, _ := os.Getgroups()
	if gid != os.Getegid() && !slices.Contains(groups, gid) {
		return false
	}
	group, err := user.LookupGroupId(strconv.Itoa(gid))
	if err != nil {
		return errors.As(err, new(user.UnknownGroupIdError))
	}
	me, err := user.LookupId(strconv.Itoa(os.Geteuid()))
	return err == nil && me.Username == group.Name
}
