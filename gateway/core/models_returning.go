// SPDX-License-Identifier: Apache-2.0

package core

import (
	"net/http"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/ringbatch/ringbatch/admin"
)

// noteRestart gives workers time to attach again if the broker drains or is a new
// one. Models that only workers declare are gone until then. The caller holds
// Asking.
func (m *models) noteRestart(has *admin.Listing) {
	if has.Draining || m.Epoch != 0 && m.Epoch != has.Epoch {
		until := time.Now().Add(m.g.Cfg.Pace.Workers)
		m.workersUntil.Store(&until)
	}
	m.Epoch = has.Epoch
}

// awaited returns an error that passes while workers may still attach again after
// a restart of the broker, else nil. The model is not there now.
func (m *models) awaited(name string) error {
	if until := m.workersUntil.Load(); until == nil || time.Now().After(*until) {
		return nil
	}
	return Refuse(http.StatusServiceUnavailable, codes.Unavailable,
		"model %q is not back yet: the broker was restarted, and its workers have not attached again", name)
}
