// SPDX-License-Identifier: Apache-2.0

// Package ringbatch only knows the version of everything that is built from this
// repository: the file VERSION, which the command, the C library, the Python
// package and the system packages are all made with. Programs import the packages
// client and worker.
package ringbatch

import (
	_ "embed"
	"strings"
)

//go:embed VERSION
var file string

// Version is like "0.1.0".
func Version() string { return strings.TrimSpace(file) }
