// SPDX-License-Identifier: Apache-2.0

package console

import (
	"crypto/sha256"
	"encoding/base64"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"
)

// The page keeps an administrator's token, so a browser must run its own script only.
func TestThePagesPolicyAllowsItsOwnScriptAndStylesOnly(t *testing.T) {
	w := httptest.NewRecorder()
	New(Config{}).ServeHTTP(w, httptest.NewRequest("GET", "/dashboard", nil))
	got, text := w.Header().Get("Content-Security-Policy"), w.Body.String()
	if strings.Contains(got, "unsafe") {
		t.Errorf("anything inline runs: %s", got)
	}
	for _, element := range []string{"script", "style"} {
		all := regexp.MustCompile(`(?s)<`+element+`\b([^>]*)>(.*?)</`+element+`>`).FindAllStringSubmatch(text, -1)
		if len(all) != 1 || all[0][1] != "" {
			t.Fatalf("%d elements %s", len(all), element)
		}
		digest := sha256.Sum256([]byte(all[0][2]))
		if want := element + "-src 'sha256-" + base64.StdEncoding.EncodeToString(digest[:]) + "';"; !strings.Contains(got, want) {
			t.Errorf("it lacks %q: %s", want, got)
		}
	}
	if found := regexp.MustCompile(`<[^>]*\s(on\w+|style)\s*=`).FindString(text); found != "" {
		t.Errorf("the policy would stop %s", found)
	}
}
