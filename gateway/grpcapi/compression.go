// SPDX-License-Identifier: Apache-2.0

package grpcapi

import (
	"compress/zlib"
	"io"

	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/gzip" // callers may compress
)

// deflate is the second compression that gRPC callers know; grpc-go brings
// gzip only.
type deflate struct{}

// Registering at initialization is what grpc-go asks for.
func init() { encoding.RegisterCompressor(deflate{}) }

func (deflate) Name() string { return "deflate" }

func (deflate) Compress(w io.Writer) (io.WriteCloser, error) { return zlib.NewWriter(w), nil }

func (deflate) Decompress(r io.Reader) (io.Reader, error) { return zlib.NewReader(r) }
