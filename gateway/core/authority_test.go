// SPDX-License-Identifier: Apache-2.0

package core

import (
	"crypto/tls"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/internal/testbed"
)

// authority makes certificates, or ends the test.
type authority struct {
	t *testing.T
	*testbed.Authority
}

func newAuthority(t *testing.T) *authority {
	a, err := testbed.NewAuthority()
	must.Do(t, err)
	return &authority{t, a}
}

// write puts a new certificate and its key into files.
func (a *authority) write(name, certFile, keyFile string) tls.Certificate {
	pair, err := a.Write(name, time.Now().Add(time.Hour), certFile, keyFile)
	must.Do(a.t, err)
	return pair
}

func (a *authority) file(path string) {
	must.Do(a.t, a.WriteOwn(path))
}

// secretFiles are a certificate with its key, and a token.
func secretFiles(t *testing.T) (cert, key, tokens string, write func(file, text string)) {
	dir := t.TempDir()
	cert, key, tokens = filepath.Join(dir, "c"), filepath.Join(dir, "k"), filepath.Join(dir, "t")
	write = func(file, text string) {
		t.Helper()
		must.Do(t, os.WriteFile(file, []byte(text), 0o600))
	}
	newAuthority(t).write("gateway", cert, key)
	write(tokens, "first first-token-0123456789\n")
	return cert, key, tokens, write
}
