package control

import (
	"fmt"
	"os"
	"path/filepath"
)

// SocketEnv chooses another control socket.
const SocketEnv = "RINGBATCH_SOCKET"

// SocketPath is where the broker listens: the path given, or the environment
// variable, or a file in the user's runtime folder.
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
	return filepath.Join(os.TempDir(), fmt.Sprintf("ringbatch-%d", os.Getuid()), "broker.sock")
}
