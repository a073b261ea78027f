// SPDX-License-Identifier: Apache-2.0

package core

import (
	"maps"
	"net/http"
	"slices"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/alias"
)

// former is what was served here before the broker was restarted. Models that only
// workers declare come back when those have attached again.
type former struct {
	names map[string]bool
	until time.Time // nobody waits for them any more
}

// remember keeps what is served now if a broker that drains or a new one has answered.
// One that drains loses the models of its workers while it still answers.
func (m *models) remember(has *admin.Listing) {
	if has.Draining || m.Epoch != 0 && m.Epoch != has.Epoch {
		m.former.Store(m.served())
	} else {
		m.forgetReturned()
	}
	m.Epoch = has.Epoch
}

// served is what is now, for when it has gone; with what has not come back since
// another restart, which may be a moment ago.
func (m *models) served() *former {
	f := &former{map[string]bool{}, time.Now().Add(m.g.Cfg.Pace.Workers)}
	for name := range *m.byName.Load() {
		f.names[name] = true
	}
	for name := range *m.Routes.Load() {
		f.names[name] = true
	}
	if old := m.former.Load(); time.Now().Before(old.until) {
		maps.Copy(f.names, old.names)
	}
	return f
}

// forgetReturned ends the wait for what has come back: if it goes after that, somebody
// removed it. An alias is back once one of its models is.
func (m *models) forgetReturned() {
	f := m.former.Load()
	left := maps.Clone(f.names) // readers take no lock
	for name := range *m.byName.Load() {
		delete(left, name)
	}
	for name, r := range *m.Routes.Load() {
		if slices.ContainsFunc(r.to, func(k *Model) bool { return k != nil }) {
			delete(left, name)
		}
	}
	if len(left) < len(f.names) {
		m.former.Store(&former{left, f.until})
	}
}

// Awaited is an error, which passes, for a model that is not there and may be about
// to come back; nil for any other.
func (m *models) Awaited(name, version string) error {
	f := m.former.Load()
	if time.Now().After(f.until) {
		return nil
	}
	is, r := f.names[name+"@"+version], (*m.Routes.Load())[name]
	switch {
	case version == "" || (*m.byName.Load())[name] == nil && r == nil:
		is = is || f.names[name]
	case r != nil:
		is = is || slices.ContainsFunc(r.To, func(t alias.Target) bool { return hasVersion(t, version) && f.names[t.Model] })
	}
	if !is {
		return nil
	}
	return Refuse(http.StatusServiceUnavailable, codes.Unavailable,
		"model %q is not back yet: the broker was restarted, and its workers have not attached again", name)
}
