// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
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

	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// startEnvoy runs deploy/envoy/envoy.yaml with these gateways.
func startEnvoy(t *testing.T, addresses ...string) string {
	t.Helper()
	binary := os.Getenv("ENVOY")
	if binary == "" {
		t.Skip("ENVOY is not set; make envoy-test installs one and runs this")
	}
	text, err := os.ReadFile("../deploy/envoy/envoy.yaml")
	must.Do(t, err)
	// Ports that are free: Envoy is asked which it got.
	config := strings.NewReplacer("port_value: 8080", "port_value: 0", "port_value: 9901", "port_value: 0", "address: 0.0.0.0",
		"address: 127.0.0.1").Replace(string(text))
	for i, address := range addresses {
		host, p, _ := net.SplitHostPort(address)
		old := fmt.Sprintf("address: gpu%d, port_value: 8001", i+1)
		if !strings.Contains(config, old) {
			t.Fatalf("the configuration has no %q", old)
		}
		config = strings.ReplaceAll(config, old, fmt.Sprintf("address: %s, port_value: %s", host, p))
	}
	dir := t.TempDir()
	file, admin := filepath.Join(dir, "envoy.yaml"), filepath.Join(dir, "admin")
	must.Do(t, os.WriteFile(file, []byte(config), 0o600))
	cmd := exec.Command(binary, "-c", file, "--admin-address-path", admin, "--disable-hot-restart", "--concurrency", "1", "--log-level",
		"warn")
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	must.Do(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	var address string
	if err := testbed.Eventually(patience, func() (err error) { address, err = listenerOf(admin); return err }); err != nil {
		t.Fatalf("Envoy does not listen: %v", err)
	}
	// A gateway whose worker had not attached yet at the first health check gets no
	// calls until the next: a test that takes a host away needs the others to be there.
	for _, host := range addresses {
		if err := testbed.Eventually(patience, func() error { return healthy(admin, host) }); err != nil {
			t.Fatalf("Envoy does not take %s for healthy: %v", host, err)
		}
	}
	return address
}

// listenerOf asks an Envoy where it listens for calls.
func listenerOf(adminFile string) (string, error) {
	text, err := askEnvoy(adminFile, "/listeners")
	if err != nil {
		return "", err
	}
	_, address, ok := strings.Cut(strings.TrimSpace(text), "inference::")
	if !ok {
		return "", fmt.Errorf("its listeners are %q", text)
	}
	return address, nil
}

// healthy asks an Envoy whether a host gets calls.
func healthy(adminFile, host string) error {
	text, err := askEnvoy(adminFile, "/clusters")
	if err != nil {
		return err
	}
	if !strings.Contains(text, host+"::health_flags::healthy\n") {
		return fmt.Errorf("its clusters are:\n%s", text)
	}
	return nil
}

// askEnvoy asks the administration of an Envoy, whose address is in a file.
func askEnvoy(adminFile, path string) (string, error) {
	admin, err := os.ReadFile(adminFile)
	if err != nil {
		return "", err
	}
	rep, err := http.Get("http://" + string(admin) + path)
	if err != nil {
		return "", err
	}
	defer rep.Body.Close()
	text, err := io.ReadAll(rep.Body)
	return string(text), err
}

func TestAHostThatDiesBehindEnvoyCostsNoRequest(t *testing.T) {
	sig := signature(t, "x:i32[1]", "y:i32[1]")
	quick := func(c *core.Config) { c.DrainTime = 1 } // it hangs up on calls in flight
	a, b := newHost(t, sig, double, quick), newHost(t, sig, double, quick)
	envoy := startEnvoy(t, a.address, b.address)
	l := newLocal(t, nil, envoy)
	c := l.dial()

	// Callers without a relay, too.
	conn, err := grpc.NewClient(envoy, grpc.WithTransportCredentials(insecure.NewCredentials()))
	must.Do(t, err)
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
