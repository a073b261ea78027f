// SPDX-License-Identifier: Apache-2.0

//go:build !xds

package relay

import (
	"strings"
	"testing"
)

func TestABuildWithoutXdsSaysSo(t *testing.T) {
	for _, target := range []string{"xds:///x", "XDS:///x"} {
		if err := Run(soon(t), Config{Model: "m", Target: target}); err == nil || !strings.Contains(err.Error(), "-tags xds") {
			t.Errorf("%s: %v", target, err)
		}
	}
}
