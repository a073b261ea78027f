// SPDX-License-Identifier: Apache-2.0

package console

import (
	"crypto/sha256"
	"encoding/base64"
	"net/http"
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

// A page of another site can point its own name to this address.
func TestThePageAnswersOnlyToKnownHosts(t *testing.T) {
	page := CheckHost(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), []string{"ops.example"})
	for host, want := range map[string]int{
		"127.0.0.1:8002": 200, "localhost:8002": 200, "[::1]:8002": 200, "OPS.example": 200,
		"evil.example:8002": 421, "127.0.0.1.evil.example": 421,
	} {
		w, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/dashboard/api/stats", nil)
		r.Host = host
		page.ServeHTTP(w, r)
		if w.Code != want || want == 421 && !strings.Contains(w.Body.String(), "--allowed-host") {
			t.Errorf("%s: %d %s", host, w.Code, w.Body)
		}
	}
	if !HostAllowed("any.example", []string{"*"}) {
		t.Error("* does not allow any")
	}
}
