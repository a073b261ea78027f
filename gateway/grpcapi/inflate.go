// SPDX-License-Identifier: Apache-2.0

package grpcapi

import (
	"compress/gzip"
	"compress/zlib"
	"context"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/gzip" // of answers
	"google.golang.org/grpc/mem"

	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
)

// grpc-go would inflate a message before the gateway can count it. Its decompressors
// therefore mark a message and leave it compressed, and receiveMessage inflates it. No message of
// protobuf begins with a zero.
const (
	markGzip    = "\x00g"
	markDeflate = "\x00z"
)

// keepGzip is the decompressor of one server.
type keepGzip struct{}

func (keepGzip) Type() string { return "gzip" }

func (keepGzip) Do(r io.Reader) ([]byte, error) {
	return io.ReadAll(io.MultiReader(strings.NewReader(markGzip), r))
}

// keepDeflate is a compression that grpc-go does not have. The registry is that of all
// clients and servers of the process: only the gateway may receive it.
type keepDeflate struct{}

var registerDeflate = sync.OnceFunc(func() { encoding.RegisterCompressor(keepDeflate{}) })

func (keepDeflate) Name() string { return "deflate" }

func (keepDeflate) Compress(w io.Writer) (io.WriteCloser, error) { return zlib.NewWriter(w), nil }

func (keepDeflate) Decompress(r io.Reader) (io.Reader, error) {
	return io.MultiReader(strings.NewReader(markDeflate), r), nil
}

// message is a received message, as a rule a ModelInferRequest.
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

// registrar registers services whose messages are counted.
type registrar struct {
	*grpc.Server
	d *rpcDoor
}

func (r registrar) RegisterService(desc *grpc.ServiceDesc, impl any) {
	d, service := r.d, *desc
	service.Methods, service.Streams = slices.Clone(service.Methods), slices.Clone(service.Streams)
	for i := range service.Methods {
		usual := service.Methods[i].Handler
		service.Methods[i].Handler = func(impl any, ctx context.Context, decode func(any) error, next grpc.UnaryServerInterceptor) (any, error) {
			return usual(impl, ctx, func(v any) error { return d.receiveMessage(ctx, decode, v) }, next)
		}
	}
	for i := range service.Streams {
		usual := service.Streams[i].Handler
		service.Streams[i].Handler = func(impl any, s grpc.ServerStream) error { return usual(impl, inflatingStream{s, d}) }
	}
	r.Server.RegisterService(&service, impl)
}

type inflatingStream struct {
	grpc.ServerStream
	d *rpcDoor
}

func (s inflatingStream) RecvMsg(v any) error {
	return s.d.receiveMessage(s.Context(), s.ServerStream.RecvMsg, v)
}

// receiveMessage receives v by usual, and counts what it inflates. A stream goes on after a Refusal.
func (d *rpcDoor) receiveMessage(ctx context.Context, usual func(any) error, v any) error {
	m, isInfer := v.(*message)
	if !isInfer {
		m = messages.Get().(*message)
		defer m.free()
	}
	err := usual(m)
	if err == nil && isMarked(m.Data) {
		err = d.inflate(ctx, m, isInfer)
	}
	if err == nil && !isInfer {
		err = d.codec.Unmarshal(m.Data, v)
	}
	return err
}

func isMarked(data mem.BufferSlice) bool {
	return len(data) > 0 && data[0].Len() > 0 && data[0].ReadOnlyData()[0] == 0
}

// inflate replaces a compressed message. Those of calls other than inference are small.
func (d *rpcDoor) inflate(ctx context.Context, m *message, isInfer bool) (err error) {
	who, most := &connOfRPC(ctx).Who, core.MaxSmallBody
	if isInfer {
		most = mostReceived(&d.g.Cfg)
		if who, _, err = d.rpcCall(ctx); err != nil {
			return rpcError(err)
		}
	}
	compressed := d.g.NewMemory(who)
	defer compressed.GiveBack()
	if err := compressed.Take(m.Data.Len()); err != nil {
		return err
	}
	r, mark := io.Reader(m.Data.Reader()), make([]byte, len(markGzip))
	if _, err := io.ReadFull(r, mark); err != nil {
		return core.BadRequest("no message begins with a zero")
	}
	if string(mark) == markGzip {
		r, err = gzip.NewReader(r)
	} else {
		_ = grpc.SetSendCompressor(ctx, encoding.Identity) // a client of this process would keep the answer deflated
		r, err = zlib.NewReader(r)
	}
	if err != nil {
		return core.BadRequest("the message is not compressed as it says: %v", err)
	}
	m.inflated = d.g.NewMemory(who)
	all, err := m.inflated.ReadCounted(http.MaxBytesReader(nil, io.NopCloser(r), int64(most)), nil, -1)
	m.Data.Free()
	m.Data = mem.BufferSlice{mem.SliceBuffer(all)}
	return err
}

func mostReceived(cfg *core.Config) int { return min(cfg.MaxMessageBytes, cfg.CallerBytes) }
