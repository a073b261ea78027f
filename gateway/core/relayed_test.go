// SPDX-License-Identifier: Apache-2.0

package core_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	reflectpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	rpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/worker"
)

// relayedCall sends rows of four bytes each as several requests.
func relayedCall(requests string, rows ...uint32) *oip.ModelInferRequest {
	var raw []byte
	for _, v := range rows {
		raw = binary.LittleEndian.AppendUint32(raw, v)
	}
	return &oip.ModelInferRequest{ModelName: "m",
		Inputs:           []*oip.ModelInferRequest_InferInputTensor{{Name: "x", Datatype: "INT32", Shape: []int64{int64(len(rows)), 1}}},
		RawInputContents: [][]byte{raw},
		Parameters: map[string]*oip.InferParameter{
			oip.RequestsParameter: {ParameterChoice: &oip.InferParameter_StringParam{StringParam: requests}}},
	}
}

// picky fails requests whose first number is odd.
func picky(ctx context.Context, b *worker.Batch) error {
	for i := range b.Len() {
		if v := worker.Row[int32](b.Input(0), b.Request(i).Row)[0]; v%2 != 0 {
			b.Fail(i, fmt.Errorf("%d is odd", v))
		}
	}
	return echo(ctx, b)
}

func TestARelaysRequestsRunInOneBatchAndFailAlone(t *testing.T) {
	m := modelConfig(t, "m", []string{"x:i32[1]"}, []string{"y:i32[1]"})
	r := newRig(t, nil, m)
	var batches atomic.Int32
	first, carryOn := make(chan struct{}), make(chan struct{})
	r.worker(m, func(ctx context.Context, b *worker.Batch) error {
		if batches.Add(1) == 1 {
			close(first)
			<-carryOn
		}
		return picky(ctx, b)
	})
	// The worker is busy until the broker has read all the requests: one could
	// be given to it before the next is read.
	var before sync.WaitGroup
	before.Go(func() {
		r.infer("m", `{"inputs":[{"name":"x","shape":[1,1],"datatype":"INT32","data":[2]}]}`).is(t, "", 200)
	})
	<-first
	go func() {
		defer close(carryOn)
		r.until("the broker has all four", func() bool { return r.stats("m").QueueLength == 4 })
	}()
	var trailer metadata.MD
	rep, err := r.client().ModelInfer(soon(t), relayedCall("1;2@900000000;1;1", 2, 4, 6, 7, 8), grpc.Trailer(&trailer))
	must.Do(t, err)
	before.Wait()
	if n := batches.Load() - 1; n != 1 {
		t.Errorf("%d batches, want 1", n)
	}
	want := relayedCall("", 2, 4, 6, 8).RawInputContents
	if !reflect.DeepEqual(rep.RawOutputContents, want) {
		t.Errorf("answer %v, want %v", rep.RawOutputContents, want)
	}
	failed := rep.Parameters[oip.FailedParameter].GetStringParam()
	if !strings.HasPrefix(failed, "2 Failed ") || !strings.Contains(failed, "7 is odd") || strings.Count(failed, "\n") != 1 {
		t.Errorf("failed: %q", failed)
	}
	load, ok := oip.ParseLoad([]byte(strings.Join(trailer.Get(oip.LoadTrailer), "")))
	if !ok || load.Utilization <= 0 || load.Compute <= 0 {
		t.Errorf("load report %+v, trailer %v", load, trailer)
	}
	r.idle()
}

func TestARelayedMessageLargerThanTheWindowGoesInPieces(t *testing.T) {
	m := modelConfig(t, "m", []string{"x:i32[1]"}, []string{"y:i32[1]"})
	m.Policy = policy.New(policy.MaxBatchSize(4), policy.WaitTime(0), policy.Slots(8))
	r := newRig(t, func(c *core.Config) { c.Window = 4 }, m)
	r.worker(m, picky)
	for range 3 {
		rep, err := r.client().ModelInfer(soon(t), relayedCall("1;2;1;5;1;4;1", 2, 3, 4, 6, 10, 10, 10, 10, 10, 8, 12, 14, 16, 18, 20))
		must.Do(t, err)
		want := relayedCall("", 2, 6, 8, 12, 14, 16, 18, 20).RawInputContents
		if !reflect.DeepEqual(rep.RawOutputContents, want) {
			t.Errorf("answer %v, want %v", rep.RawOutputContents, want)
		}
		failed := rep.Parameters[oip.FailedParameter].GetStringParam()
		for _, line := range []string{"1 Failed ", "3 TooLarge "} {
			if !strings.Contains(failed, line) {
				t.Errorf("failed: %q, want %q", failed, line)
			}
		}
	}
	r.idle()
}

// Any caller can send relayed requests, so their failures count against it, too.
func TestFailuresOfRelayedRequestsMakeASuspect(t *testing.T) {
	m := modelConfig(t, "m", []string{"x:i32[1]"}, []string{"y:i32[1]"})
	r := newRig(t, nil, m)
	r.worker(m, picky)
	for range 2 {
		_, err := r.client().ModelInfer(soon(t), relayedCall("1;1;1;1;1;1", 1, 3, 5, 7, 9, 11))
		must.Do(t, err)
	}
	r.until("it has a client beside that of the others", func() bool { return r.stats("m").Clients == 2 })
	r.idle()
}

func TestARelayedRequestExpiresByItself(t *testing.T) {
	m := modelConfig(t, "m", []string{"x:i32[1]"}, []string{"y:i32[1]"})
	r := newRig(t, nil, m)
	r.worker(m, func(ctx context.Context, b *worker.Batch) error {
		for i := range b.Len() {
			hasty := worker.Row[int32](b.Input(0), b.Request(i).Row)[0] == 4
			for end := time.Now().Add(patience); hasty && b.Waiting(i) && time.Now().Before(end); {
				time.Sleep(time.Millisecond)
			}
		}
		return echo(ctx, b)
	})
	rep, err := r.client().ModelInfer(soon(t), relayedCall("1;1@10000", 2, 4))
	must.Do(t, err)
	if failed := rep.Parameters[oip.FailedParameter].GetStringParam(); !strings.HasPrefix(failed, "1 Expired ") {
		t.Errorf("failed: %q", failed)
	}
	if want := relayedCall("", 2).RawInputContents; !reflect.DeepEqual(rep.RawOutputContents, want) {
		t.Errorf("answer %v, want %v", rep.RawOutputContents, want)
	}
	r.idle()
}

func TestRelayedRequestsKeepTheirOwnSizes(t *testing.T) {
	m := modelConfig(t, "m", []string{"x:u8[<=9]"}, []string{"y:u8[<=9]"})
	r := newRig(t, nil, m)
	r.worker(m, sameSizeEach)
	call := &oip.ModelInferRequest{ModelName: "m",
		Inputs:           []*oip.ModelInferRequest_InferInputTensor{{Name: "x", Datatype: "UINT8", Shape: []int64{4, 5}}},
		RawInputContents: [][]byte{[]byte("abcde" + "fg" + "hi" + "jkl")},
		Parameters:       relayedCall("1x5;2x2;1x3").Parameters,
	}
	rep, err := r.client().ModelInfer(soon(t), call)
	must.Do(t, err)
	if got := string(rep.RawOutputContents[0]); got != "abcdefghijkl" {
		t.Errorf("answer %q", got)
	}
	if got := rep.Parameters[oip.SizesParameter].GetStringParam(); got != "5;2,2;3" {
		t.Errorf("sizes %q", got)
	}
	var header metadata.MD
	if _, err := r.client().ModelMetadata(soon(t), &oip.ModelMetadataRequest{Name: "m"}, grpc.Header(&header)); err != nil {
		t.Fatal(err)
	}
	if got := header.Get(oip.SignatureHeader); !reflect.DeepEqual(got, []string{"x:u8[<=9] -> y:u8[<=9]"}) {
		t.Errorf("signature %q", got)
	}
}

// sameSizeEach is sameSize with each request's own size.
func sameSizeEach(ctx context.Context, b *worker.Batch) error {
	for i := range b.Len() {
		if err := b.SetOutputDims(i, int(b.Request(i).Dims()[0])); err != nil {
			return err
		}
	}
	return echo(ctx, b)
}

func TestARelaysNonsenseIsRefused(t *testing.T) {
	m := modelConfig(t, "m", []string{"x:i32[1]"}, []string{"y:i32[1]"})
	r := newRig(t, nil, m)
	r.worker(m, echo)
	for text, why := range map[string]string{"1;1": "2 rows", "0": "number of rows", "2;1x7": "semicolon", "3@": "microseconds",
		"": "number of rows"} {
		_, err := r.client().ModelInfer(soon(t), relayedCall(text, 1, 2, 3))
		if rpcstatus.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), why) {
			t.Errorf("%q: %v", text, err)
		}
	}
	r.idle()
}

func TestHealthOfAModelIsToldAndFollowsItsWorkers(t *testing.T) {
	m := modelConfig(t, "m", []string{"x:i32[1]"}, []string{"y:i32[1]"})
	tokens := filepath.Join(t.TempDir(), "tokens")
	must.Do(t, os.WriteFile(tokens, []byte("somebody 0123456789abcdef\n"), 0o600))
	r := newRig(t, func(c *core.Config) { c.TokenFile = tokens }, m) // probes need none
	conn, err := grpc.NewClient(r.grpc, grpc.WithTransportCredentials(insecure.NewCredentials()))
	must.Do(t, err)
	defer conn.Close()
	watched := func(service string) grpc.ServerStreamingClient[healthpb.HealthCheckResponse] {
		watch, err := healthpb.NewHealthClient(conn).Watch(soon(t), &healthpb.HealthCheckRequest{Service: service})
		must.Do(t, err)
		return watch
	}
	next := func(watch grpc.ServerStreamingClient[healthpb.HealthCheckResponse], want healthpb.HealthCheckResponse_ServingStatus) {
		t.Helper()
		for {
			rep, err := watch.Recv()
			must.Do(t, err)
			if rep.Status == want {
				return
			}
		}
	}
	model := watched("m")
	next(model, healthpb.HealthCheckResponse_NOT_SERVING) // no worker yet
	leave := r.worker(m, echo)
	next(model, healthpb.HealthCheckResponse_SERVING)
	for _, service := range []string{"", "inference.GRPCInferenceService"} {
		next(watched(service), healthpb.HealthCheckResponse_SERVING)
	}
	leave()
	next(model, healthpb.HealthCheckResponse_NOT_SERVING)
}

// Tools like grpcurl ask what a server serves.
func TestTheGRPCDoorDescribesItsServices(t *testing.T) {
	r := newRig(t, nil)
	conn, err := grpc.NewClient(r.grpc, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.UseCompressor("gzip")))
	must.Do(t, err)
	defer conn.Close()
	s, err := reflectpb.NewServerReflectionClient(conn).ServerReflectionInfo(soon(t))
	must.Do(t, err)
	for want, ask := range map[string]*reflectpb.ServerReflectionRequest{
		"inference.GRPCInferenceService": {MessageRequest: &reflectpb.ServerReflectionRequest_ListServices{}},
		"raw_input_contents": {MessageRequest: &reflectpb.ServerReflectionRequest_FileContainingSymbol{
			FileContainingSymbol: "inference.GRPCInferenceService"}},
	} {
		must.Do(t, s.Send(ask))
		rep, err := s.Recv()
		must.Do(t, err)
		if text, err := proto.Marshal(rep); err != nil || !strings.Contains(string(text), want) {
			t.Errorf("nothing of %s in %v, %v", want, rep, err)
		}
	}
}
