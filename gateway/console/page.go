// SPDX-License-Identifier: Apache-2.0

package console

import (
	"crypto/sha256"
	"crypto/subtle"
	_ "embed"
	"encoding/base64"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"strconv"
	"strings"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
)

// The page is one file without outside resources. It gets its data from
// /dashboard/api, with the rights of its user.
//
//go:embed page.html
var page []byte

// contentPolicy names the page's script and styles by their digests. A browser runs
// no other script, whatever a text on the page contains.
var contentPolicy = "default-src 'none'; style-src " + inlineDigest("style") + "; script-src " + inlineDigest("script") +
	"; connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"

// inlineDigest returns the digest of the page's only element of that name.
func inlineDigest(element string) string {
	_, rest, _ := strings.Cut(string(page), "<"+element+">")
	text, _, _ := strings.Cut(rest, "</"+element+">")
	digest := sha256.Sum256([]byte(text))
	return "'sha256-" + base64.StdEncoding.EncodeToString(digest[:]) + "'"
}

// AdminHeader carries the token for changes. A form of another site cannot set it;
// Authorization may carry the gateway's token.
const AdminHeader = "X-Ringbatch-Admin"

const maxChange = 64 << 10 // bytes of a request that changes something

type api struct {
	admin     *admin.Client
	tokenFile string
}

func (a *api) register(mux *http.ServeMux) {
	mux.HandleFunc("GET /dashboard", func(w http.ResponseWriter, _ *http.Request) {
		h := w.Header()
		h.Set("Content-Type", "text/html; charset=utf-8")
		h.Set("Cache-Control", "no-cache")
		h.Set("Content-Security-Policy", contentPolicy)
		h.Set("X-Content-Type-Options", "nosniff")
		_, _ = w.Write(page)
	})
	mux.HandleFunc("GET /dashboard/api/stats", func(w http.ResponseWriter, r *http.Request) {
		raw, err := a.admin.StatsJSON(r.Context())
		answer(w, json.RawMessage(raw), err)
	})
	mux.HandleFunc("GET /dashboard/api/batches", func(w http.ResponseWriter, r *http.Request) {
		since, err := strconv.ParseUint(r.FormValue("since"), 10, 64)
		if err != nil {
			http.Error(w, "since is not a number", http.StatusBadRequest)
			return
		}
		b, err := a.admin.Batches(r.Context(), r.FormValue("model"), since)
		answer(w, b, err)
	})
	mux.HandleFunc("GET /dashboard/api/access", func(w http.ResponseWriter, r *http.Request) {
		answer(w, map[string]bool{"possible": a.tokenFile != "", "allowed": a.mayChange(r) == nil}, nil)
	})
	mux.HandleFunc("POST /dashboard/api/change", a.change)
}

func (a *api) change(w http.ResponseWriter, r *http.Request) {
	if err := a.mayChange(r); err != nil {
		http.Error(w, err.Error(), http.StatusForbidden)
		return
	}
	var c struct {
		Model     string
		Settings  policy.Policy
		Instances int
	}
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxChange)).Decode(&c); err != nil {
		http.Error(w, "not understood: "+err.Error(), http.StatusBadRequest)
		return
	}
	var err error
	if len(c.Settings) > 0 {
		err = a.admin.Set(r.Context(), c.Model, c.Settings)
	}
	if err == nil && c.Instances > 0 {
		err = a.admin.Scale(r.Context(), c.Model, c.Instances, false)
	}
	answer(w, "changed", err)
}

var (
	errNoChanges = errors.New("this page is for reading only: start it with --admin-token-file to change things here")
	errNoToken   = errors.New("unknown token: it has to be one of --admin-token-file")
)

// mayChange compares the token with those of the file. It reads the file each time,
// so that a new token counts at once.
func (a *api) mayChange(r *http.Request) error {
	if a.tokenFile == "" {
		return errNoChanges
	}
	text, err := os.ReadFile(a.tokenFile)
	if err != nil {
		return errNoChanges
	}
	shown, found := sha256.Sum256([]byte(r.Header.Get(AdminHeader))), 0
	for _, line := range strings.Split(string(text), "\n") {
		if f := strings.Fields(line); len(f) == 2 && !strings.HasPrefix(f[0], "#") && len(f[1]) >= leastToken {
			digest := sha256.Sum256([]byte(f[1]))
			found |= subtle.ConstantTimeCompare(shown[:], digest[:])
		}
	}
	if found == 0 {
		return errNoToken
	}
	return nil
}

const leastToken = 16 // characters; shorter ones are too easy to guess

func answer(w http.ResponseWriter, v any, err error) {
	w.Header().Set("Cache-Control", "no-store")
	if err != nil {
		code := http.StatusServiceUnavailable
		if errors.Is(err, status.ErrInvalid) || errors.Is(err, status.ErrUnknownModel) {
			code = http.StatusBadRequest
		}
		http.Error(w, err.Error(), code)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v)
}
