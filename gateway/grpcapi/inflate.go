// SPDX-License-Identifier: Apache-2.0

package grpcapi

import (
	"compress/zlib"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net/http"
	"slices"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/gzip" // callers may compress
	"google.golang.org/grpc/mem"

	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
)

// message is a received ModelInferRequest.
type message struct {
	oip.Request
	inflated core.Memory // of a compressed message, until the call has it
}

var messages = sync.Pool{New: func() any { return new(message) }}

func (m *message) free() {
	m.Free()
	m.inflated.GiveBack()
	messages.Put(m)
}

// incoming is the part of grpc-go's stream below RecvMsg. RecvMsg inflates a message
// before the gateway can count it.
type incoming interface {
	RecvCompress() string
	ReadMessageHeader(head []byte) error
	Read(n int) (mem.BufferSlice, error)
}

var errNoIncoming = errors.New("this release of grpc-go hides its streams: see grpcapi/inflate.go")

// register registers a service, and makes it receive compressed messages by receiveCounted.
func (d *rpcDoor) register(s *grpc.Server, service grpc.ServiceDesc, impl any) {
	service.Methods, service.Streams = slices.Clone(service.Methods), slices.Clone(service.Streams)
	for i := range service.Methods {
		usual := service.Methods[i].Handler
		service.Methods[i].Handler = func(impl any, ctx context.Context, decode func(any) error, next grpc.UnaryServerInterceptor) (any, error) {
			return usual(impl, ctx, d.receiver(ctx, decode), next)
		}
	}
	for i := range service.Streams {
		usual := service.Streams[i].Handler
		service.Streams[i].Handler = func(impl any, s grpc.ServerStream) error {
			return usual(impl, countedStream{s, d.receiver(s.Context(), s.RecvMsg)})
		}
	}
	s.RegisterService(&service, impl)
}

type countedStream struct {
	grpc.ServerStream
	receive func(any) error
}

func (s countedStream) RecvMsg(m any) error { return s.receive(m) }

// receiver returns what receives the messages of a call: usual, unless they may be compressed.
func (d *rpcDoor) receiver(ctx context.Context, usual func(any) error) func(any) error {
	s, ok := grpc.ServerTransportStreamFromContext(ctx).(incoming)
	if !ok {
		return func(any) error { return errNoIncoming }
	}
	if name := s.RecvCompress(); name == "" || name == encoding.Identity {
		return usual
	}
	return func(v any) error { return d.receiveCounted(ctx, s, v) }
}

// receiveCounted receives a message as RecvMsg does, but counts what it inflates.
func (d *rpcDoor) receiveCounted(ctx context.Context, s incoming, v any) error {
	var head [5]byte
	if err := s.ReadMessageHeader(head[:]); err != nil {
		return err
	}
	n, most := int(binary.BigEndian.Uint32(head[1:])), mostReceived(&d.g.Cfg)
	if n > most {
		return rpcError(core.TooLarge(int64(n), most)) // no Refusal: the rest of the stream is lost
	}
	data, err := s.Read(n)
	if errors.Is(err, io.EOF) {
		return rpcError(core.BadRequest("the message ends early"))
	} else if err != nil {
		return err
	}
	defer data.Free()
	conn := connOfRPC(ctx)
	defer conn.Arriving.Arrived(conn, len(head)+n)
	if head[0] == 0 { // not compressed
		return d.codec.Unmarshal(data, v)
	}
	who, memory := &conn.Who, new(core.Memory)
	if m, ok := v.(*message); ok {
		if who, _, err = d.rpcCall(ctx); err != nil {
			return rpcError(err)
		}
		memory = &m.inflated
	} else {
		most = min(most, core.MaxSmallBody)
		defer memory.GiveBack()
	}
	*memory = d.g.NewMemory(who)
	all, err := inflate(s.RecvCompress(), data.Reader(), most, memory)
	if err != nil {
		return err
	}
	return d.codec.Unmarshal(mem.BufferSlice{mem.SliceBuffer(all)}, v)
}

func mostReceived(cfg *core.Config) int { return min(cfg.MaxMessageBytes, cfg.CallerBytes) }

func inflate(name string, data io.Reader, most int, memory *core.Memory) ([]byte, error) {
	r, err := encoding.GetCompressor(name).Decompress(data)
	if err != nil {
		return nil, core.BadRequest("the message is no %s: %v", name, err)
	}
	if c, ok := r.(io.Closer); ok {
		defer c.Close()
	}
	return memory.ReadCounted(http.MaxBytesReader(nil, io.NopCloser(r), int64(most)), nil, -1)
}

// deflate is a compression of gRPC callers that grpc-go does not have.
type deflate struct{}

// grpc-go wants compressors registered at initialization.
func init() { encoding.RegisterCompressor(deflate{}) }

func (deflate) Name() string { return "deflate" }

func (deflate) Compress(w io.Writer) (io.WriteCloser, error) { return zlib.NewWriter(w), nil }

func (deflate) Decompress(r io.Reader) (io.Reader, error) { return zlib.NewReader(r) }
