// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"compress/gzip"
	"compress/zlib"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	rpcstatus "google.golang.org/grpc/status"

	"github.com/ringbatch/ringbatch/broker/configfile"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
)

func TestAGatewayThatWouldNotStartIsRefused(t *testing.T) {
	for text, want := range map[string]error{
		"[gateway]\n": nil,
		"[gateway]\nhttp = \"0.0.0.0:8000\"\ninsecure = true\nallowed_host = \"*\"\ndrain_delay = \"5s\"\n": nil,
		"[gateway]\nhttp = 8000\ndrain_delay = \"1s\"\n":                                                    nil,
		"[gateway]\nhttpp = 8000\n":                      errUsage,
		"[gateway]\nhttp = \"0.0.0.0:8000\"\n":           status.ErrInvalid,
		"[gateway]\ntls_cert = \"/there/is/none.pem\"\n": status.ErrInvalid,
	} {
		cfg, err := configfile.Parse(text)
		if err == nil {
			err = checkGateway(cfg.Workers)
		}
		if !errors.Is(err, want) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestABrokerIsNotStartedWhereAnotherProcessHasThePortOfItsGateway(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must.Do(t, err)
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	cfg, err := configfile.Parse("[gateway]\nhttp = \"off\"\ngrpc = " + port + "\n")
	must.Do(t, err)
	if err := checkGatewayPorts(cfg.Workers); err == nil || !strings.Contains(err.Error(), "choose another with --grpc PORT") {
		t.Error(err)
	}
}

func TestTheExampleThatAGatewayPrintsIsShortOrNotThere(t *testing.T) {
	for inputs, want := range map[string]string{
		"x:f32[2]":         `{"inputs":[{"name":"x","datatype":"FP32","shape":[1,2],"data":[0,0]}]}`,
		"b:bool[<=9]":      `{"inputs":[{"name":"b","datatype":"BOOL","shape":[1,1],"data":[false]}]}`,
		"y:i8[]":           `{"inputs":[{"name":"y","datatype":"INT8","shape":[1],"data":[0]}]}`,
		"x:f32[3,224,224]": "",
	} {
		sig, err := tensor.ParseSignature([]string{inputs}, []string{"y:f32[1]"})
		if inputs == "y:i8[]" {
			sig, err = tensor.ParseSignature([]string{inputs}, []string{"z:f32[1]"})
		}
		must.Do(t, err)
		if got := example(&sig); got != want {
			t.Errorf("%s: %s", inputs, got)
		}
	}
}

func TestARelaysZerosAreRefused(t *testing.T) {
	for _, flag := range []string{"--in-flight=0", "--attempts=0", "--check-interval=0", "--check-timeout=0s"} {
		err := runRelay(t.Context(), []string{"model", "--to", "127.0.0.1:8001", flag})
		if name, _, _ := strings.Cut(flag, "="); !errors.Is(err, errUsage) || !strings.Contains(err.Error(), name+" must be more than 0") {
			t.Errorf("%s: %v", flag, err)
		}
	}
}

// bomb compresses every message to the same bytes: 12 MiB of zeros.
type bomb struct {
	name  string
	bytes bytes.Buffer
}

func newBomb(name string, pack func(io.Writer) io.WriteCloser) *bomb {
	b := &bomb{name: name}
	w := pack(&b.bytes)
	_, _ = w.Write(make([]byte, 12<<20))
	w.Close()
	return b
}

func (b *bomb) Type() string { return b.name }

func (b *bomb) Do(w io.Writer, _ []byte) error {
	_, err := w.Write(b.bytes.Bytes())
	return err
}

func TestAGatewayKeepsItsMemoryWhenMessagesInflate(t *testing.T) {
	c := startCLI(t)
	g := c.start("gateway", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--log-level", "warn", "--max-buffered-bytes", fmt.Sprint(64<<20))
	t.Cleanup(func() { c.ends(g) })
	for _, b := range []*bomb{newBomb("gzip", func(w io.Writer) io.WriteCloser { return gzip.NewWriter(w) }),
		newBomb("deflate", func(w io.Writer) io.WriteCloser { return zlib.NewWriter(w) })} {
		//lint:ignore SA1019 the client compresses beforehand, so that all messages come at once
		conn, err := grpc.NewClient(c.door(g, "grpc"), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithCompressor(b))
		must.Do(t, err)
		defer conn.Close()
		rpc := oip.NewGRPCInferenceServiceClient(conn)
		for what, isRefused := range map[string]func() bool{
			"ModelInfer": func() bool {
				_, err := rpc.ModelInfer(t.Context(), &oip.ModelInferRequest{ModelName: "affine"})
				return rpcstatus.Code(err) == codes.ResourceExhausted
			},
			"ModelMetadata": func() bool {
				_, err := rpc.ModelMetadata(t.Context(), &oip.ModelMetadataRequest{Name: "affine"})
				return rpcstatus.Code(err) == codes.ResourceExhausted
			},
			"HTTP": func() bool {
				req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+c.door(g, "http")+"/v2/models/affine/infer",
					bytes.NewReader(b.bytes.Bytes()))
				must.Do(t, err)
				req.Header.Set("Content-Encoding", b.name)
				rep, err := http.DefaultClient.Do(req)
				must.Do(t, err)
				rep.Body.Close()
				return rep.StatusCode == http.StatusTooManyRequests
			},
		} {
			var all sync.WaitGroup
			var refusals atomic.Int64
			for range 40 {
				all.Go(func() {
					if isRefused() {
						refusals.Add(1)
					}
				})
			}
			if all.Wait(); refusals.Load() == 0 {
				t.Errorf("%s, %s: none of 40 was refused", what, b.name)
			}
		}
	}
	u, err := testbed.UsageOf(g.Pid())
	must.Do(t, err)
	if documented := int64(128<<20 + 2*64<<20); u.Peak > documented+documented/4 { // Go's limit is soft
		t.Errorf("it had %d MiB, %d at most are documented", u.Peak>>20, documented>>20)
	}
}
