// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"
)

// webServer is the REST side: sessions of our own for what is plain, and an
// http.Server for the rest.
type webServer struct {
	g      *Gateway
	l      *listener
	usual  *http.Server
	given  chan net.Conn // connections for the http.Server
	closed chan struct{}
	once   sync.Once

	mu       sync.Mutex
	sessions map[*session]struct{}
}

func (g *Gateway) newHTTP(l *listener) *webServer {
	if g.cfg.CertFile == "" {
		l.full = tooMany("too many connections")
		l.crowd = tooMany("too many connections of one address (--caller_connections)")
	}
	l.idle = g.cfg.pace.idle
	s := &webServer{g: g, l: l, given: make(chan net.Conn), closed: make(chan struct{}), sessions: map[*session]struct{}{}}
	s.usual = &http.Server{
		Handler:           http.HandlerFunc(httpDoor{g}.serveGuarded),
		TLSConfig:         g.tlsConfig("h2", "http/1.1"),
		ReadHeaderTimeout: max(headerTimeout, g.cfg.pace.body),
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxURLHeaderBytes,
		ConnContext:       withConn,
		ConnState:         followState,
		ErrorLog:          slog.NewLogLogger(g.log.Handler(), slog.LevelDebug),
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams:          streamsPerConnection,
			MaxReceiveBufferPerConnection: connectionWindow,
			MaxReceiveBufferPerStream:     streamWindow,
			SendPingTimeout:               keepaliveTime,
			PingTimeout:                   keepaliveTimeout,
			WriteByteTimeout:              answerPatience,
		},
	}
	return s
}

// tooMany is the answer to one that is hung up on before it has asked.
func tooMany(text string) []byte {
	return []byte("HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n\r\n{\"error\":\"" + text + "\"}")
}

// serve accepts connections until the server is closed.
func (s *webServer) serve() error {
	if s.usual.TLSConfig != nil { // encrypting costs more than sessions save
		return s.usual.ServeTLS(s.l, "", "")
	}
	go func() { _ = s.usual.Serve((*givenListener)(s)) }()
	for {
		nc, err := s.l.Accept()
		if err != nil {
			select {
			case <-s.closed:
				return http.ErrServerClosed
			default:
			}
			var t interface{ Temporary() bool } // out of descriptors, perhaps
			if errors.As(err, &t) && t.Temporary() {
				time.Sleep(10 * time.Millisecond)
				continue
			}
			return err
		}
		c := nc.(*conn)
		c.http = s
		v := &session{door: httpDoor{s.g}, conn: c}
		s.mu.Lock()
		s.sessions[v] = struct{}{}
		s.mu.Unlock()
		go func() {
			defer func() {
				s.mu.Lock()
				delete(s.sessions, v)
				s.mu.Unlock()
			}()
			v.serve()
		}()
	}
}

// shutdown ends connections when they are idle, until all have ended or ctx has.
func (s *webServer) shutdown(ctx context.Context) error {
	s.once.Do(func() { close(s.closed) })
	s.l.Close()
	if err := s.usual.Shutdown(ctx); err != nil {
		return err
	}
	for {
		s.mu.Lock()
		left := len(s.sessions)
		for v := range s.sessions {
			if v.conn.retire() {
				v.conn.Close()
			}
		}
		s.mu.Unlock()
		if left == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Millisecond):
		}
	}
}

// close ends everything now.
func (s *webServer) close() {
	s.once.Do(func() { close(s.closed) })
	s.l.Close()
	s.usual.Close()
	s.l.closeAll()
}

// give hands a connection to the http.Server, unless that takes none any more.
func (s *webServer) give(c *givenConn) bool {
	select {
	case s.given <- c:
		return true
	case <-s.closed:
		return false
	}
}

// givenListener is where the http.Server gets connections from.
type givenListener webServer

func (l *givenListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.given:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *givenListener) Close() error   { return nil }
func (l *givenListener) Addr() net.Addr { return l.l.Addr() }

// givenConn begins with what a session has read already.
type givenConn struct {
	*conn
	ahead  []byte
	length lengthSearch
}

func (c *givenConn) Read(p []byte) (n int, err error) {
	if len(c.ahead) > 0 {
		n = copy(p, c.ahead)
		c.ahead = c.ahead[n:]
	} else {
		n, err = c.conn.Read(p)
	}
	if c.noLength.Load() && c.length.finds(p[:n]) {
		c.noLength.Store(false)
	}
	return n, err
}

// lengthSearch looks for a line that begins with Content-Length in what comes
// piece by piece: it is how much of that the last piece ended with. Bodies are
// searched too, as it is not known here where they end: one that has such a line
// costs its caller the connection, at worst.
type lengthSearch int

const lengthLine = "\ncontent-length" // its first byte is in it once

// finds tells whether it is in the next piece.
func (s *lengthSearch) finds(p []byte) bool {
	n := int(*s)
	for _, c := range p {
		if 'A' <= c && c <= 'Z' {
			c += 'a' - 'A'
		}
		switch c {
		case lengthLine[n]:
			if n++; n == len(lengthLine) {
				return true
			}
		case lengthLine[0]:
			n = 1
		default:
			n = 0
		}
	}
	*s = lengthSearch(n)
	return false
}

func (c *givenConn) NetConn() net.Conn { return c.conn }
