// SPDX-License-Identifier: Apache-2.0

package grpcapi

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	rpcpeer "google.golang.org/grpc/peer"
	"google.golang.org/grpc/reflection"
	rpcstatus "google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"

	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
)

type rpcDoor struct {
	oip.UnimplementedGRPCInferenceServiceServer
	g     *core.Gateway
	codec oip.Codec
}

// NewGRPC makes the server of the gRPC door.
func NewGRPC(g *core.Gateway) *grpc.Server {
	registerDeflate()
	door := &rpcDoor{g: g, codec: oip.NewCodec()}
	options := []grpc.ServerOption{
		grpc.ForceServerCodecV2(door.codec),
		grpc.Creds(rpcCredentials{g.TLSConfig("h2")}),
		grpc.MaxRecvMsgSize(mostReceived(&g.Cfg)),
		//lint:ignore SA1019 the registry that it names is that of all of the process
		grpc.RPCDecompressor(keepGzip{}),
		grpc.MaxSendMsgSize(1<<31 - 1),
		grpc.MaxConcurrentStreams(core.StreamsPerConnection),
		grpc.MaxHeaderListSize(core.MaxURLHeaderBytes),
		grpc.InitialWindowSize(core.StreamWindow),
		grpc.InitialConnWindowSize(core.ConnectionWindow),
		grpc.NumStreamWorkers(32),
		grpc.ConnectionTimeout(core.BodyPatience),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: core.GRPCIdleTimeout, Time: core.KeepaliveTime,
			Timeout: core.KeepaliveTimeout}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: core.KeepaliveTimeout, PermitWithoutStream: true}),
		grpc.StatsHandler(rpcStats{}),
		grpc.InTapHandle(door.admitCall),
		grpc.ChainUnaryInterceptor(door.intercept),
	}
	s := grpc.NewServer(options...)
	service := oip.GRPCInferenceService_ServiceDesc
	service.Methods = slices.Clone(service.Methods)
	for i := range service.Methods {
		if service.Methods[i].MethodName == "ModelInfer" {
			service.Methods[i].Handler = func(_ any, ctx context.Context, decode func(any) error,
				_ grpc.UnaryServerInterceptor) (any, error) {
				return door.infer(ctx, decode)
			}
		}
	}
	service.Streams = slices.Clone(service.Streams)
	for i := range service.Streams {
		if service.Streams[i].StreamName == "ModelStreamInfer" {
			service.Streams[i].Handler = func(_ any, s grpc.ServerStream) error { return door.inferStream(s) }
		}
	}
	r := registrar{s, door}
	r.RegisterService(&service, door)
	healthpb.RegisterHealthServer(r, healthDoor{g.Health, g})
	reflection.Register(r)
	return s
}

// admitCall checks a call's token after its headers, before its message is read.
func (d *rpcDoor) admitCall(ctx context.Context, info *tap.Info) (context.Context, error) {
	if d.g.Cfg.TokenFile != "" && !isHealthCheck(info.FullMethodName) {
		if _, err := d.rpcCaller(ctx, info.Header); err != nil {
			return ctx, rpcError(err)
		}
	}
	return endEarly(ctx, &d.g.Cfg.Pace, info.Header), nil
}

func rpcError(err error) error {
	if err == nil {
		return nil
	}
	return rpcstatus.Error(core.MeaningOf(err).GRPC, core.TextOf(err))
}

// intercept runs calls other than inference.
func (d *rpcDoor) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (_ any, err error) {
	defer d.guard(&err)
	if d.g.Cfg.ClientCAFile != "" && !isHealthCheck(info.FullMethod) {
		if _, _, err := d.rpcCall(ctx); err != nil {
			return nil, rpcError(err)
		}
	}
	rep, err := next(ctx, req)
	return rep, rpcError(err)
}

// guard, deferred, makes a panic end one call; in grpc-go it would end the gateway.
func (d *rpcDoor) guard(err *error) {
	if fault := recover(); fault != nil {
		d.g.LogFault(fault)
		*err = core.ErrFault
	}
}

func (d *rpcDoor) rpcCaller(ctx context.Context, header metadata.MD) (*core.Caller, error) {
	p, ok := rpcpeer.FromContext(ctx)
	if !ok {
		return nil, errors.New("a call without a peer")
	}
	info, ok := p.AuthInfo.(*rpcAuth)
	if !ok {
		return nil, errors.New("a call without a connection")
	}
	authorization := ""
	if d.g.Cfg.TokenFile != "" {
		if v := header.Get("authorization"); len(v) > 0 {
			authorization = v[0]
		}
	}
	return d.g.Identify(info.conn, authorization, info.tls)
}

func (d *rpcDoor) rpcCall(ctx context.Context) (*core.Caller, *core.Conn, error) {
	var header metadata.MD
	if d.g.Cfg.TokenFile != "" {
		header, _ = metadata.FromIncomingContext(ctx)
	}
	who, err := d.rpcCaller(ctx, header)
	if err != nil {
		return nil, nil, err
	}
	return who, connOfRPC(ctx), nil
}

func connOfRPC(ctx context.Context) *core.Conn {
	p, _ := rpcpeer.FromContext(ctx)
	return p.AuthInfo.(*rpcAuth).conn
}

// rpcCredentials give calls their connection, with TLS or without.
type rpcCredentials struct{ config *tls.Config }

type rpcAuth struct {
	credentials.CommonAuthInfo
	conn *core.Conn
	tls  *tls.ConnectionState
}

func (*rpcAuth) AuthType() string { return "ringbatch" }

func (c rpcCredentials) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	auth := &rpcAuth{conn: raw.(*core.Conn)}
	if c.config == nil {
		auth.SecurityLevel = credentials.NoSecurity
		return rpcConn{raw, auth.conn}, auth, nil
	}
	t := tls.Server(raw, c.config)
	if err := t.Handshake(); err != nil {
		raw.Close()
		return nil, nil, err
	}
	state := t.ConnectionState()
	auth.SecurityLevel, auth.tls = credentials.PrivacyAndIntegrity, &state
	return rpcConn{t, auth.conn}, auth, nil
}

func (rpcCredentials) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("these are a server's credentials")
}

func (rpcCredentials) Info() credentials.ProtocolInfo            { return credentials.ProtocolInfo{} }
func (c rpcCredentials) Clone() credentials.TransportCredentials { return c }
func (rpcCredentials) OverrideServerName(string) error           { return nil }

// endEarly makes a call's deadline a little shorter, so that the handler's answer
// precedes the transport's reset at the deadline. A caller takes the reset for
// CANCELLED if its clock is behind; the clock of gRPC's C core counts milliseconds.
//
// Clients of grpc-go have a finer clock and keep their deadline: a relay would take
// an early end for a host's fault.
func endEarly(ctx context.Context, p *core.Pace, header metadata.MD) context.Context {
	deadline, ok := ctx.Deadline()
	if !ok {
		return ctx
	}
	if agent := header.Get("user-agent"); len(agent) > 0 && strings.HasPrefix(agent[0], "grpc-go/") {
		return ctx
	}
	early := min(p.Early, time.Until(deadline)/time.Duration(p.EarlyShare))
	ctx, cancel := context.WithDeadline(ctx, deadline.Add(-early))
	_ = cancel // the stream's end cancels it
	return ctx
}
