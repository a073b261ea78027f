// SPDX-License-Identifier: Apache-2.0

package ringbatch

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

func TestTheVersionIsSemantic(t *testing.T) {
	if !regexp.MustCompile(`^\d+\.\d+\.\d+(-rc\.\d+)?\n$`).MatchString(file) {
		t.Errorf("VERSION is %q; it must be like 0.1.0 or 0.2.0-rc.1, and a newline", file)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// What cannot read the file names the version too.
func TestTheChangelogAndTheManifestsNameThisVersion(t *testing.T) {
	heading := regexp.MustCompile(`(?m)^## .*$`).FindString(read(t, "CHANGELOG.md"))
	if !strings.Contains(heading, Version()) {
		t.Errorf("the first heading of CHANGELOG.md is %q, VERSION says %s", heading, Version())
	}
	manifests, _ := filepath.Glob("deploy/k*/*.yaml")
	images := 0
	for _, path := range manifests {
		for _, found := range regexp.MustCompile(`image: \S*/ringbatch:(\S+)`).FindAllStringSubmatch(read(t, path), -1) {
			if images++; found[1] != Version() {
				t.Errorf("%s: image of version %s, VERSION says %s", path, found[1], Version())
			}
		}
	}
	if images == 0 {
		t.Errorf("no image found in %d manifests", len(manifests))
	}
}

func TestTheCHeaderHasThisVersion(t *testing.T) {
	var major, minor, patch int
	if _, err := fmt.Sscanf(Version(), "%d.%d.%d", &major, &minor, &patch); err != nil {
		t.Fatal(err)
	}
	header := read(t, "cbindings/ringbatch.h")
	for _, line := range []string{
		fmt.Sprintf("#define RINGBATCH_VERSION %q\n", Version()),
		fmt.Sprintf("#define RINGBATCH_VERSION_NUMBER %d ", 10000*major+100*minor+patch),
	} {
		if !strings.Contains(header, line) {
			t.Errorf("cbindings/ringbatch.h needs the line %q", line)
		}
	}
}
