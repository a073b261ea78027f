// SPDX-License-Identifier: Apache-2.0

package httpapi

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/ringbatch/ringbatch/gateway/console"
	"github.com/ringbatch/ringbatch/gateway/core"
)

// headerLength is the header with the length of a binary body's JSON.
const headerLength = "Inference-Header-Content-Length"

type httpDoor struct{ g *core.Gateway }

// NewHTTP makes the server of the HTTP door. ReadTimeout holds until pacedBody
// moves the deadline.
func NewHTTP(g *core.Gateway, l *core.Listener) *http.Server {
	if g.Cfg.CertFile == "" {
		l.Refusal = []byte("HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n" +
			"Retry-After: 1\r\nConnection: close\r\n\r\n" + `{"error":"too many connections (--max-connections, --caller-connections)"}`)
	}
	return &http.Server{
		Handler:           http.HandlerFunc(httpDoor{g}.guarded),
		TLSConfig:         g.TLSConfig("h2", "http/1.1"),
		ReadHeaderTimeout: g.Cfg.Pace.Body,
		ReadTimeout:       g.Cfg.Pace.Body,
		IdleTimeout:       g.Cfg.Pace.Idle,
		MaxHeaderBytes:    core.MaxURLHeaderBytes,
		ConnContext:       core.WithConn,
		ErrorLog:          slog.NewLogLogger(g.Log.Handler(), slog.LevelDebug),
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams:          core.StreamsPerConnection,
			MaxReceiveBufferPerConnection: core.ConnectionWindow,
			MaxReceiveBufferPerStream:     core.StreamWindow,
			SendPingTimeout:               core.KeepaliveTime,
			PingTimeout:                   core.KeepaliveTimeout,
			WriteByteTimeout:              core.AnswerPatience,
		},
	}
}

// ServeHTTP accepts connections until the server is closed.
func ServeHTTP(s *http.Server, l net.Listener) error {
	if s.TLSConfig != nil {
		return s.ServeTLS(l, "", "")
	}
	return s.Serve(l)
}

func (d httpDoor) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := strings.Split(strings.TrimPrefix(r.URL.EscapedPath(), "/"), "/")
	for i, p := range path {
		if strings.IndexByte(p, '%') >= 0 {
			path[i], _ = url.PathUnescape(p)
		}
	}
	if n := len(path); n > 1 && path[n-1] == "" {
		path = path[:n-1]
	}
	if err := d.checkHost(r.Host); err != nil {
		writeError(w, err)
		return
	}
	who, err := d.g.Identify(core.ConnOf(r.Context()), r.Header.Get("Authorization"), r.TLS)
	if err == nil || isProbe(path) {
		if len(path) > 2 && isInference(path[len(path)-1]) && r.Method == http.MethodPost {
			err = d.infer(w, r, who, path)
		} else {
			err = d.ask(w, r, who, path)
		}
	}
	if err != nil {
		writeError(w, err)
	}
}

// checkHost refuses names other than the gateway's own, where callers need not
// show who they are. Otherwise a page of another site could point its name to this
// address, and reach the gateway through a browser here (DNS rebinding).
func (d httpDoor) checkHost(host string) error {
	cfg := &d.g.Cfg
	if cfg.TokenFile != "" || cfg.ClientCAFile != "" || console.HostAllowed(host, cfg.AllowedHosts) {
		return nil
	}
	return core.Refuse(http.StatusMisdirectedRequest, codes.PermissionDenied, "this gateway is not known as %q: "+console.HostAdvice, host)
}

// guarded is ServeHTTP, but a panic is logged and ends one request.
func (d httpDoor) guarded(w http.ResponseWriter, r *http.Request) {
	defer func() {
		if fault := recover(); fault != nil && fault != http.ErrAbortHandler {
			d.g.LogFault(fault)
			panic(http.ErrAbortHandler)
		}
	}()
	if d.g.Draining.Load() != core.NotDraining || hasUnsureEnd(r) { // the next request has to go elsewhere
		w.Header().Set("Connection", "close")
	}
	d.ServeHTTP(w, r)
}

// hasUnsureEnd reports whether a proxy in front may see another end of the request than
// net/http, which hides a Content-Length beside a Transfer-Encoding: what follows could be
// another caller's request. RFC 9112 (6.1, 6.3) closes such connections.
func hasUnsureEnd(r *http.Request) bool {
	return r.ProtoMajor == 1 && (r.ProtoMinor == 0 || len(r.TransferEncoding) > 0)
}

// isProbe reports whether a path needs no token: health, and the page, which has no
// data in it.
func isProbe(path []string) bool {
	return len(path) > 1 && path[0] == "v2" && path[1] == "health" || len(path) == 1 && path[0] == "dashboard"
}

var errNoPath = errors.New("no such path")

// Allowed methods.
const (
	toRead   = "GET, HEAD"
	toChange = "POST"
	toBoth   = toRead + ", " + toChange
)

// checkMethod refuses other methods: a link or an image must not change anything.
func checkMethod(r *http.Request, allowed string) error {
	if slices.Contains(strings.Split(allowed, ", "), r.Method) {
		return nil
	}
	return core.NotAllowed(fmt.Sprintf("%s %s: it is to be %s", r.Method, r.URL.Path, allowed), allowed)
}

// ask answers requests other than inference.
func (d httpDoor) ask(w http.ResponseWriter, r *http.Request, who *core.Caller, path []string) error {
	if path[0] != "v2" {
		return d.other(w, r)
	}
	r.Body = http.MaxBytesReader(w, r.Body, core.MaxSmallBody)
	var err error
	switch path = path[1:]; {
	case len(path) == 0:
		if err = checkMethod(r, toRead); err == nil {
			writeMessage(w, d.g.ServerMetadata())
		}
	case path[0] == "health":
		err = d.health(w, r, path[1:])
	case path[0] == "models" && len(path) == 2 && path[1] == "stats":
		err = d.stats(w, r, "", "")
	case path[0] == "models" && len(path) > 1:
		err = d.model(w, r, path[1:])
	case path[0] == "repository":
		err = d.repository(w, r, path[1:])
	case path[0] == "systemsharedmemory" || path[0] == "cudasharedmemory":
		err = d.sharedMemory(w, r, who, path)
	default:
		err = errNoPath
	}
	if errors.Is(err, errNoPath) {
		return d.other(w, r)
	}
	return err
}

// other serves paths outside the protocol. Unknown paths below /v2 get an error in
// JSON, as clients of the protocol expect.
func (d httpDoor) other(w http.ResponseWriter, r *http.Request) error {
	if protocols := r.URL.Path == "/v2" || strings.HasPrefix(r.URL.Path, "/v2/"); d.g.Cfg.Other != nil && !protocols {
		d.g.Cfg.Other.ServeHTTP(w, r)
		return nil
	}
	return core.Refuse(http.StatusNotFound, 5, "%s %s: no such path", r.Method, r.URL.Path)
}

func (d httpDoor) health(w http.ResponseWriter, r *http.Request, path []string) error {
	if len(path) != 1 || path[0] != "live" && path[0] != "ready" {
		return errNoPath
	}
	err := checkMethod(r, toRead)
	switch {
	case err != nil:
	case path[0] == "live":
		err = d.g.Live()
	default:
		err = d.g.Ready()
	}
	if err == nil {
		w.WriteHeader(http.StatusOK)
	}
	return err
}

// model answers NAME[/versions/VERSION][/ready|config|stats].
func (d httpDoor) model(w http.ResponseWriter, r *http.Request, path []string) error {
	name, version, path := modelPath(path)
	allowed := toRead
	if len(path) == 1 && isInference(path[0]) {
		allowed = toChange
	}
	if err := checkMethod(r, allowed); err != nil {
		return err
	}
	k, as, err := d.g.Models.About(r.Context(), name, version)
	if err != nil {
		return err
	}
	switch {
	case len(path) == 0:
		writeMessage(w, k.Metadata(as))
	case len(path) > 1:
		return errNoPath
	case path[0] == "ready":
		if err := d.g.ModelReady(k); err != nil {
			return err
		}
		w.WriteHeader(http.StatusOK)
	case path[0] == "config":
		writeMessage(w, k.Config())
	case path[0] == "stats":
		return d.stats(w, r, name, version)
	default:
		return errNoPath
	}
	return nil
}

func modelPath(path []string) (name, version string, rest []string) {
	name, rest = path[0], path[1:]
	if len(rest) > 1 && rest[0] == "versions" {
		return name, rest[1], rest[2:]
	}
	return name, "", rest
}

func (d httpDoor) stats(w http.ResponseWriter, r *http.Request, name, version string) error {
	if err := checkMethod(r, toRead); err != nil {
		return err
	}
	s, err := d.g.Statistics(r.Context(), name, version)
	if err == nil {
		writeMessage(w, s)
	}
	return err
}

// repository answers index, and models/NAME/load|unload.
func (d httpDoor) repository(w http.ResponseWriter, r *http.Request, path []string) error {
	switch {
	case len(path) == 1 && path[0] == "index":
		if err := checkMethod(r, toBoth); err != nil {
			return err
		}
		b := []byte{'['}
		for i, m := range d.g.Index().Models {
			if i > 0 {
				b = append(b, ',')
			}
			b = appendMessage(b, m)
		}
		writeJSON(w, append(b, ']'))
		return nil
	case len(path) == 3 && path[0] == "models" && (path[2] == "load" || path[2] == "unload"):
		if err := checkMethod(r, toChange); err != nil {
			return err
		}
		if path[2] == "unload" {
			return d.g.Unload(r.Context(), path[1])
		}
		var body struct{ Parameters map[string]any }
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil && err != io.EOF {
			return core.Refuse(http.StatusBadRequest, codes.InvalidArgument, "load: its body is not JSON: %v", err)
		}
		return d.g.Load(r.Context(), path[1], len(body.Parameters))
	}
	return errNoPath
}

func writeMessage(w http.ResponseWriter, m proto.Message) { writeJSON(w, appendMessage(nil, m)) }

func writeJSON(w http.ResponseWriter, b []byte) {
	h := w.Header()
	h["Content-Type"] = typeJSON
	h["Content-Length"] = []string{strconv.Itoa(len(b))}
	_, _ = w.Write(b)
}

var (
	typeJSON   = []string{"application/json"}
	typeBinary = []string{"application/octet-stream"}
)

func writeError(w http.ResponseWriter, err error) {
	m := core.MeaningOf(err)
	b := append(appendString([]byte(`{"error":`), core.TextOf(err)), '}')
	h := w.Header()
	h["Content-Type"] = typeJSON
	h["Content-Length"] = []string{strconv.Itoa(len(b))}
	switch m.HTTP {
	case http.StatusTooManyRequests, http.StatusServiceUnavailable:
		h.Set("Retry-After", "1")
	case http.StatusUnauthorized:
		h.Set("WWW-Authenticate", "Bearer")
	case http.StatusMethodNotAllowed:
		var r *core.Refusal
		if errors.As(err, &r) {
			h.Set("Allow", r.Allow)
		}
	}
	w.WriteHeader(m.HTTP)
	_, _ = w.Write(b)
}
