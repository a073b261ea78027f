// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// gateway starts one on a free port, and returns where its HTTP door is.
func (c *cli) gateway(flags ...string) string {
	c.t.Helper()
	g := c.start(append([]string{"gateway", "--http", "127.0.0.1:0", "--grpc", "off", "--log-level", "warn"}, flags...)...)
	c.t.Cleanup(func() { c.ends(g) })
	return "http://" + c.door(g, "http")
}

// door returns the address of a gateway's door.
func (c *cli) door(g *testbed.Process, protocol string) (address string) {
	c.t.Helper()
	c.until("the gateway says where it is", func() bool {
		for line := range strings.Lines(g.Log()) {
			if a, ok := strings.CutPrefix(line, protocol+" "); ok {
				address = strings.TrimSpace(a)
			}
		}
		return address != ""
	})
	return address
}

func (c *cli) affineWorker() {
	c.t.Helper()
	w := c.start("worker", "affine", "--scale", "2", "--input", "x:f32[4]")
	c.t.Cleanup(func() { c.ends(w) })
	c.must("ready", "affine", "--wait", "2m")
}

// ask sends requests from several goroutines of one client.
func (c *cli) ask(n, callers int) {
	c.t.Helper()
	cl, err := client.Dial(c.t.Context(), "affine", client.WithWindow(callers))
	must.Do(c.t, err)
	defer cl.Close()
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			for range n / callers {
				if _, err := cl.Infer(c.t.Context(), []float32{1, 2, 3, 4}); err != nil {
					c.t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// keepAsking asks again and again until stop is called.
func (c *cli) keepAsking() (stop func()) {
	c.t.Helper()
	cl, err := client.Dial(c.t.Context(), "affine", client.WithWindow(8))
	must.Do(c.t, err)
	ctx, cancel := context.WithCancel(c.t.Context())
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for ; ctx.Err() == nil; time.Sleep(10 * time.Millisecond) {
				if _, err := cl.Infer(c.t.Context(), []float32{1, 2, 3, 4}); err != nil {
					c.t.Error(err)
					return
				}
			}
		})
	}
	stop = sync.OnceFunc(func() { cancel(); wg.Wait(); _ = cl.Close() })
	c.t.Cleanup(stop)
	return stop
}

func get(t *testing.T, address string) (string, int) {
	t.Helper()
	rep, err := http.Get(address)
	must.Do(t, err)
	defer rep.Body.Close()
	body, err := io.ReadAll(rep.Body)
	must.Do(t, err)
	return string(body), rep.StatusCode
}

// value finds a metric in the text format, by its name with labels.
func value(t *testing.T, text, name string) float64 {
	t.Helper()
	for _, line := range strings.Split(text, "\n") {
		if rest, ok := strings.CutPrefix(line, name+" "); ok {
			v, err := strconv.ParseFloat(rest, 64)
			must.Do(t, err)
			return v
		}
	}
	t.Errorf("no metric %s", name)
	return -1
}

func TestMetricsAreWhatTheBrokerCounts(t *testing.T) {
	c := startCLI(t)
	base := c.gateway()
	if text, code := get(t, base+"/metrics"); code != 200 || value(t, text, "ringbatch_up") != 1 || value(t, text,
		`ringbatch_model_workers_ready{model="affine"}`) != 0 {
		t.Errorf("without a worker: %d\n%s", code, text)
	}
	c.affineWorker()
	c.ask(200, 4)
	c.until("the broker has heard of every end", func() bool { // workers answer clients first, then the broker
		m := c.stats().Models[0]
		return m.Ended["OK"] == 200 && m.Workers[0].State == "idle"
	})
	text, _ := get(t, base+"/metrics")
	m := c.stats().Models[0]
	for name, want := range map[string]float64{
		`ringbatch_model_requests_total{model="affine"}`:                            200,
		`ringbatch_model_requests_ended_total{end="OK",model="affine"}`:             200,
		`ringbatch_model_requests_ended_total{end="Expired",model="affine"}`:        0,
		`ringbatch_model_rows_total{model="affine"}`:                                200,
		`ringbatch_model_batches_total{model="affine"}`:                             float64(m.Batches),
		`ringbatch_model_batch_rows_count{model="affine"}`:                          float64(m.Batches),
		`ringbatch_model_batch_rows_sum{model="affine"}`:                            200,
		`ringbatch_model_request_duration_seconds_count{model="affine"}`:            200,
		`ringbatch_model_request_duration_seconds_bucket{model="affine",le="+Inf"}`: 200,
		`ringbatch_model_workers_ready{model="affine"}`:                             1,
		`ringbatch_model_workers{model="affine",state="idle"}`:                      1,
		`ringbatch_model_wait_time_seconds{model="affine"}`:                         0.005,
		`ringbatch_model_slots_used{model="affine",state="queued"}`:                 0,
		`ringbatch_gateway_connections_refused_total{door="http"}`:                  0,
		`ringbatch_worker_batches_total{gpu="",model="affine",worker="affine"}`:     float64(m.Batches),
	} {
		if got := value(t, text, name); got != want {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
	checkMetrics(t, text)
	c.ends(c.broker)
	if text, code := get(t, base+"/metrics"); code != 200 || value(t, text, "ringbatch_up") != 0 {
		t.Errorf("without a broker: %d\n%s", code, text)
	}
	c.broker = c.start("broker", "--config", c.config, "--log-level", "warn") // for the cleanup
	c.until("it answers", func() bool { _, code := c.run("ready", "--live"); return code == 0 })
}

// checkMetrics has promtool judge the names.
func checkMetrics(t *testing.T, text string) {
	cmd := exec.Command("promtool", "check", "metrics")
	cmd.Stdin = strings.NewReader(text)
	if out, err := cmd.CombinedOutput(); needs(t, "promtool") && (err != nil || len(out) > 0) {
		t.Errorf("promtool check metrics: %v\n%s", err, out)
	}
}

// needs reports whether a program is installed. `make operate` installs the programs of this
// package's tests and sets the variable that makes a missing program an error.
func needs(t *testing.T, program string) bool {
	t.Helper()
	_, err := exec.LookPath(program)
	if err != nil && os.Getenv("RINGBATCH_TEST_ALL") != "" {
		t.Fatal(err)
	}
	if err != nil {
		t.Logf("left out: %v (make operate installs it)", err)
	}
	return err == nil
}

func TestTheAlertRulesAreHeldByTheirTests(t *testing.T) {
	if !needs(t, "promtool") {
		t.Skip()
	}
	for _, args := range [][]string{{"check", "rules", "alerts.yml"}, {"test", "rules", "alerts_test.yml"}} {
		cmd := exec.Command("promtool", args...)
		cmd.Dir = "../../deploy/prometheus"
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
}

func TestPrometheusScrapesTheGatewayAndAnswersAP99Query(t *testing.T) {
	if !needs(t, "prometheus") {
		t.Skip()
	}
	c := startCLI(t)
	base := c.gateway()
	c.affineWorker()
	address := prometheusHost + ":" + freePort(t, prometheusHost)
	config := fmt.Sprintf("global: {scrape_interval: 1s}\nscrape_configs:\n  - job_name: ringbatch\n    static_configs: [{targets: "+
		"[%q]}]\n", strings.TrimPrefix(base, "http://"))
	must.Do(t, os.WriteFile(c.bed.Path("prometheus.yml"), []byte(config), 0o600))
	p := exec.Command("prometheus", "--config.file", c.bed.Path("prometheus.yml"), "--storage.tsdb.path", c.bed.Path("tsdb"),
		"--web.listen-address", address, "--log.level", "warn")
	var log bytes.Buffer
	p.Stdout, p.Stderr = &log, &log
	must.Do(t, p.Start())
	t.Cleanup(func() { _ = p.Process.Kill(); _ = p.Wait() })
	// The quantile of what each scrape adds needs two of them with load between.
	query := `histogram_quantile(0.99, sum by (model, le) (rate(ringbatch_model_request_duration_seconds_bucket[10s])))`
	var p99 float64
	for end := time.Now().Add(patience); p99 == 0; {
		c.ask(100, 4)
		p99 = ask(address, query)
		if time.Now().After(end) {
			t.Fatalf("Prometheus has no answer\n%s", &log)
		}
	}
	m := c.stats().Models[0]
	if least, most := m.Latency.Total.P50/1e3/2, m.Latency.Total.Max/1e3*2; p99 < least || p99 > most {
		t.Errorf("Prometheus says a p99 of %v s, the requests took %v to %v s", p99, least, most)
	}
	// A scrape that took longer than a second is none.
	c.until("Prometheus knows that a worker is ready", func() bool { return ask(address, "ringbatch_model_workers_ready") == 1 })
}

// ask is an instant query with one number as its answer; 0 if there is none
// yet.
func ask(address, query string) float64 {
	rep, err := http.Get("http://" + address + "/api/v1/query?query=" + url.QueryEscape(query))
	if err != nil {
		return 0 // it is still starting
	}
	defer rep.Body.Close()
	var answer struct {
		Data struct{ Result []struct{ Value [2]any } }
	}
	if err := json.NewDecoder(rep.Body).Decode(&answer); err != nil || len(answer.Data.Result) != 1 {
		return 0
	}
	v, err := strconv.ParseFloat(fmt.Sprint(answer.Data.Result[0].Value[1]), 64)
	if err != nil || v != v {
		return 0
	}
	return v
}

// prometheusHost is not 127.0.0.1, whose ports any connection of this machine may take.
const prometheusHost = "127.0.0.3"

func freePort(t *testing.T, host string) string {
	l, err := net.Listen("tcp", host+":0")
	must.Do(t, err)
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	return port
}
