// SPDX-License-Identifier: Apache-2.0

package grpcapi

import (
	"compress/zlib"
	"io"

	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/gzip" // callers may compress
)

// deflate is a compression of gRPC callers that grpc-go does not have.
type deflate struct{}

// grpc-go wants compressors registered at initialization.
func init() { encoding.RegisterCompressor(deflate{}) }

func (deflate) Name() string { return "deflate" }

func (deflate) Compress(w io.Writer) (io.WriteCloser, error) { return zlib.NewWriter(w), nil }

func (deflate) Decompress(r io.Reader) (io.Reader, error) { return zlib.NewReader(r) }
