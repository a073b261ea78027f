// SPDX-License-Identifier: Apache-2.0

package configfile

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
)

// The users of the manuals do not exist on this machine, so root replaces them.
func TestEveryConfigurationOfTheManualsIsAccepted(t *testing.T) {
	pages, err := filepath.Glob("../../docs/*.md")
	must.Do(t, err)
	users := strings.NewReplacer(`"web"`, `"root"`, `"ml"`, `"root"`, `"oncall"`, `"root"`)
	block, found := regexp.MustCompile("(?ms)^```toml\n(.*?)^```$"), 0
	for _, page := range pages {
		text, err := os.ReadFile(page)
		must.Do(t, err)
		for _, m := range block.FindAllStringSubmatch(string(text), -1) {
			found++
			if _, err := Parse(users.Replace(m[1])); err != nil {
				t.Errorf("%s: %v, in\n%s", filepath.Base(page), err, m[1])
			}
		}
	}
	if found < 5 {
		t.Errorf("%d blocks were found", found)
	}
}
