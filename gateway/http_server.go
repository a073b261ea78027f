package gateway

import (
	"net"
	"net/http"
)

// newHTTP makes the server of the REST side.
func (g *Gateway) newHTTP(l *listener) *http.Server {
	l.full = []byte("HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n\r\n{\"error\":\"too many connections\"}")
	if g.cfg.CertFile != "" {
		l.full = nil
	}
	s := &http.Server{
		Handler:           httpDoor{g},
		TLSConfig:         g.tlsConfig("h2", "http/1.1"),
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxURLHeaderBytes,
		ConnContext:       withConn,
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

func (g *Gateway) serveHTTP(s *http.Server, l net.Listener) error {
	if s.TLSConfig != nil {
		return s.ServeTLS(l, "", "")
	}
	return s.Serve(l)
}
