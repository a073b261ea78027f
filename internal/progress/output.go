// SPDX-License-Identifier: Apache-2.0

package progress

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// CanWrite refuses a file that could not be written after minutes of measuring.
// It is neither made nor emptied yet: a run that is interrupted leaves what was
// there. No path is fine.
func CanWrite(path string) error {
	if path == "" {
		return nil
	}
	st, err := os.Stat(path)
	switch {
	case err == nil && st.IsDir():
		err = syscall.EISDIR
	case err == nil:
		err = unix.Access(path, unix.W_OK)
	case errors.Is(err, fs.ErrNotExist):
		err = unix.Access(filepath.Dir(path), unix.W_OK|unix.X_OK)
	}
	if err != nil {
		return fmt.Errorf("%s cannot be written: %w", path, err)
	}
	return nil
}
