// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/ringbatch/ringbatch/gateway"
	"github.com/ringbatch/ringbatch/gateway/oip"
)

// freePort is one that nobody has at the moment.
func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	return port
}

// startEnvoy runs deploy/envoy/envoy.yaml with these gateways.
func startEnvoy(t *testing.T, addresses ...string) string {
	t.Helper()
	binary := os.Getenv("ENVOY")
	if binary == "" {
		t.Skip("ENVOY is not set; make envoy-test installs one and runs this")
	}
	text, err := os.ReadFile("../deploy/envoy/envoy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	port := freePort(t)
	config := strings.NewReplacer("port_value: 8080", "port_value: "+port, "port_value: 9901", "port_value: "+freePort(t), "address: 0.0.0.0", "address: 127.0.0.1").Replace(string(text))
	for i, address := range addresses {
		host, p, _ := net.SplitHostPort(address)
		old := fmt.Sprintf("address: gpu%d, port_value: 8001", i+1)
		if !strings.Contains(config, old) {
			t.Fatalf("the configuration has no %q", old)
		}
		config = strings.ReplaceAll(config, old, fmt.Sprintf("address: %s, port_value: %s", host, p))
	}
	file := filepath.Join(t.TempDir(), "envoy.yaml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(binary, "-c", file, "--use-dynamic-base-id", "--concurrency", "1", "--log-level", "warn")
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return net.JoinHostPort("127.0.0.1", port)
}

func TestAHostThatDiesBehindEnvoyCostsNoRequest(t *testing.T) {
	sig := signature(t, "x:i32[1]", "y:i32[1]")
	quick := func(c *gateway.Config) { c.DrainTime = 1 } // it hangs up on what is in flight
	a, b := newHost(t, sig, double, quick), newHost(t, sig, double, quick)
	envoy := startEnvoy(t, a.address, b.address)
	l := newLocal(t, nil, envoy)
	c := l.dial()

	// Callers without a relay, too.
	conn, err := grpc.NewClient(envoy, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	service := oip.NewGRPCInferenceServiceClient(conn)
	direct := func(ctx context.Context) error {
		_, err := service.ModelInfer(ctx, &oip.ModelInferRequest{ModelName: "m", RawInputContents: [][]byte{{2, 0, 0, 0}},
			Inputs: []*oip.ModelInferRequest_InferInputTensor{{Name: "x", Datatype: "INT32", Shape: []int64{1, 1}}}})
		return err
	}
	l.eventually("Envoy passes calls on", func() bool { return direct(soon(t)) == nil })

	var calls, failed atomic.Int32
	var all sync.WaitGroup
	for g := range 4 {
		all.Go(func() {
			for i := range 100 {
				if g == 0 && i == 30 {
					a.stop()
				}
				calls.Add(2)
				q := commit(t, c, int32(2*i))[0]
				if err := q.Wait(soon(t)); err != nil {
					failed.Add(1)
					t.Errorf("relayed: %v", err)
				}
				_ = q.Release()
				if err := direct(soon(t)); err != nil {
					failed.Add(1)
					t.Errorf("direct: %v", err)
				}
			}
		})
	}
	all.Wait()
	t.Logf("%d of %d calls failed", failed.Load(), calls.Load())
}
