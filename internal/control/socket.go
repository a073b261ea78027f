// SPDX-License-Identifier: Apache-2.0

package control

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// SocketEnv is the environment variable with the path of the control socket.
const SocketEnv = "RINGBATCH_SOCKET"

// SocketPath is the path of the broker's socket: the given path, or that of SocketEnv, or
// a file in the user's runtime folder.
func SocketPath(given string) string {
	if given != "" {
		return given
	}
	if p := os.Getenv(SocketEnv); p != "" {
		return p
	}
	if dir := os.Getenv("XDG_RUNTIME_DIR"); dir != "" {
		return filepath.Join(dir, "ringbatch", "broker.sock")
	}
	return filepath.Join(fallbackFolder(), "broker.sock")
}

func fallbackFolder() string {
	return filepath.Join(os.TempDir(), fmt.Sprintf("ringbatch-%d", os.Getuid()))
}

// CheckFolder refuses a socket in the fallback folder if the folder does not belong to
// this user: another user could make it first and receive this user's inputs. A folder
// that the user has chosen is trusted.
func CheckFolder(socket string) error {
	dir := filepath.Dir(socket)
	if dir != fallbackFolder() {
		return nil
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return nil // no broker there
	}
	if st, ok := info.Sys().(*syscall.Stat_t); !ok || !info.IsDir() || int(st.Uid) != os.Getuid() {
		return fmt.Errorf("%s was not made by this user: remove it, or choose another socket", dir)
	}
	return nil
}
