// SPDX-License-Identifier: Apache-2.0

//go:build !xds

package relay

import (
	"strings"
	"testing"
)

func TestABuildWithoutXdsSaysSo(t *testing.T) {
	if err := Run(soon(t), Config{Model: "m", Target: "xds:///x"}); err == nil || !strings.Contains(err.Error(), "-tags xds") {
		t.Error(err)
	}
}
