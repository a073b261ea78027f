// SPDX-License-Identifier: Apache-2.0

package console

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

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
		if w.Code != want || want == 421 && !strings.Contains(w.Body.String(), "--allowed_host") {
			t.Errorf("%s: %d %s", host, w.Code, w.Body)
		}
	}
	if !HostAllowed("any.example", []string{"*"}) {
		t.Error("* does not allow any")
	}
}
