// SPDX-License-Identifier: Apache-2.0

package console

import (
	"context"
	"maps"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
)

const scrapeTime = 5 * time.Second

// metricsHandler answers /metrics. Each scrape takes a snapshot of the broker.
func metricsHandler(a *admin.Client, more ...prometheus.Collector) http.Handler {
	r := prometheus.NewRegistry()
	r.MustRegister(&collector{a})
	r.MustRegister(more...)
	return promhttp.HandlerFor(r, promhttp.HandlerOpts{})
}

// collector converts the broker's statistics. docs/operate.md has the table.
type collector struct{ admin *admin.Client }

type metric struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
}

var metrics []*metric // every row below, for Describe

func newMetric(kind prometheus.ValueType, name, help string, labels ...string) *metric {
	m := &metric{prometheus.NewDesc("ringbatch_"+name, help, labels, nil), kind}
	metrics = append(metrics, m)
	return m
}

const (
	counter   = prometheus.CounterValue
	gauge     = prometheus.GaugeValue
	histogram = prometheus.UntypedValue // not used as a kind
)

var (
	up             = newMetric(gauge, "up", "Whether the broker answered this scrape.")
	weightsVersion = newMetric(gauge, "weights_version", "Version of the live weights in force.", "model")
	weightsAge     = newMetric(gauge, "weights_age_seconds", "Since the latest live weights were published.", "model")
	weightsLag     = newMetric(gauge, "weights_lag_versions", "Versions that the slowest worker is behind.", "model")

	started  = newMetric(gauge, "broker_start_time_seconds", "When the broker started, in Unix time.")
	draining = newMetric(gauge, "broker_draining", "Whether the broker drains and takes no new requests.")

	requests   = newMetric(counter, "model_requests_total", "Requests that the broker accepted.", "model")
	ended      = newMetric(counter, "model_requests_ended_total", "Requests that have ended, by how.", "model", "end")
	requeued   = newMetric(counter, "model_requests_requeued_total", "Requests that were tried again after their worker died.", "model")
	isolated   = newMetric(counter, "model_requests_isolated_total", "Requests that were run again after their batch failed.", "model")
	begun      = newMetric(counter, "model_state_begun_total", "Rows that were sent with a state of zero.", "model")
	stateBytes = newMetric(gauge, "model_state_bytes", "Bytes of the states of all slots.", "model")
	batches    = newMetric(counter, "model_batches_total", "Batches sent to workers.", "model")
	rows       = newMetric(counter, "model_rows_total", "Rows sent to workers.", "model")
	dispatched = newMetric(counter, "model_dispatches_total", "Batches sent to workers, by the rule that sent them.", "model", "reason")

	total     = newMetric(histogram, "model_request_duration_seconds", "From commit to answer, of requests that a worker ended.", "model")
	queue     = newMetric(histogram, "model_queue_duration_seconds", "From commit to dispatch.", "model")
	handover  = newMetric(histogram, "model_handover_duration_seconds", "From dispatch until the worker begins.", "model")
	compute   = newMetric(histogram, "model_compute_duration_seconds", "The worker's own time, of each request of a batch.", "model")
	batchRows = newMetric(histogram, "model_batch_rows", "Rows of each batch.", "model")

	queueRequests = newMetric(gauge, "model_queue_requests", "Requests that wait for a batch.", "model")
	slots         = newMetric(gauge, "model_slots", "Slots of the ring, one per row.", "model")
	slotsUnleased = newMetric(gauge, "model_slots_unleased", "Slots that are in no client's window.", "model")
	slotsUsed     = newMetric(gauge, "model_slots_used",
		"Slots of requests: queued, running, or held (ended early, a worker still has them).", "model", "state")
	clients = newMetric(gauge, "model_clients", "Clients that are attached, each with a window of slots.", "model")
	workers = newMetric(gauge, "model_workers", "Workers that are attached, by state.", "model", "state")
	lanes   = newMetric(gauge, "model_lanes", "Batches that the workers can run at once, by whether they do.", "model", "state")
	rounds  = newMetric(gauge, "model_rounds", "Rounds that a row took in its lane, on average, where the workers say it.", "model")
	ready   = newMetric(gauge, "model_workers_ready",
		"Workers that can be counted on: they wait for work, or their batch does not take unusually long.", "model")
	attached    = newMetric(counter, "model_workers_attached_total", "Workers that ever attached.", "model")
	awake       = newMetric(gauge, "model_awake", "1 if the broker has started the model's workers and one attached.", "model")
	wakes       = newMetric(counter, "model_wakes_total", "Starts of the model's workers that succeeded.", "model")
	wakesFailed = newMetric(counter, "model_wakes_failed_total", "Starts of the model's workers that failed.", "model")
	wakeTime    = newMetric(gauge, "model_wake_seconds", "From the last start to the first worker.", "model")
	gpuMemory   = newMetric(gauge, "model_gpu_memory_bytes", "Memory that the model's workers hold, declared or measured.", "model", "gpu")
	suspended   = newMetric(counter, "model_workers_suspended_total", "Suspensions of workers that failed what others ran.", "model")
	lost        = newMetric(counter, "model_workers_lost_total", "Workers that left or died.", "model")
	hung        = newMetric(counter, "model_workers_hung_total", "Workers that outlived their lease.", "model")
	offenders   = newMetric(counter, "model_offenders_total", "Peers that broke the protocol and were disconnected.", "model")
	maxBatch    = newMetric(gauge, "model_max_batch_rows", "Setting max_batch_size: most rows of a batch.", "model")
	waitTime    = newMetric(gauge, "model_wait_time_seconds",
		"How long the oldest request waits for others to batch with, as it is in force.", "model")
	latencyGoal = newMetric(gauge, "model_latency_goal_seconds", "Setting latency_goal, where it is set.", "model")

	aliasShare   = newMetric(gauge, "alias_share_ratio", "Share of the traffic that an alias gives a model.", "alias", "model")
	aliasClients = newMetric(gauge, "alias_clients", "Clients that attached to an alias, by the model that they have.", "alias", "model")

	workerBusy    = newMetric(counter, "worker_busy_seconds_total", "Time that an attached worker computed.", "model", "worker", "gpu")
	workerBatches = newMetric(counter, "worker_batches_total", "Batches that an attached worker finished.", "model", "worker", "gpu")

	processUp       = newMetric(gauge, "process_up", "Whether a worker process that the broker starts is running.", "model", "process")
	processRestarts = newMetric(counter, "process_restarts_total", "How often the broker started it again.", "model", "process")

	loopRounds    = newMetric(counter, "loop_rounds_total", "How often a loop of the broker was awake.", "loop")
	loopDecisions = newMetric(counter, "loop_decisions_total", "Decisions of the loop's batchers.", "loop")
)

func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range metrics {
		ch <- m.desc
	}
}

func (c *collector) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTime)
	defer cancel()
	s, err := c.admin.Stats(ctx)
	put := func(m *metric, value float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(m.desc, m.kind, value, valid(labels)...)
	}
	if err != nil {
		put(up, 0)
		return
	}
	put(up, 1)
	put(started, math.Round(float64(time.Now().Unix())-s.UptimeS))
	put(draining, number(s.Draining))
	for i := range s.Models {
		collectModel(ch, put, &s.Models[i])
	}
	for _, a := range s.Aliases {
		for _, t := range a.To {
			put(aliasShare, t.SharePercent/100, a.Name, t.Model)
			put(aliasClients, float64(t.Clients), a.Name, t.Model)
		}
	}
	for _, p := range s.Processes {
		put(processUp, number(p.State == "running"), p.Model, p.Name)
		put(processRestarts, float64(p.Restarts), p.Model, p.Name)
	}
	for i := range s.Weights {
		w := &s.Weights[i]
		put(weightsVersion, float64(w.Version), w.Model)
		put(weightsAge, w.AgeS, w.Model)
		put(weightsLag, float64(w.Lag()), w.Model)
	}
	for i, l := range s.Loops {
		put(loopRounds, float64(l.Rounds), strconv.Itoa(i))
		put(loopDecisions, float64(l.Decisions), strconv.Itoa(i))
	}
}

func collectModel(ch chan<- prometheus.Metric, put func(m *metric, value float64, labels ...string), m *stats.Model) {
	for _, v := range []struct {
		is    *metric
		value float64
	}{
		{requests, float64(m.Requests)}, {requeued, float64(m.Requeued)}, {isolated, float64(m.Isolated)},
		{batches, float64(m.Batches)}, {rows, float64(m.Rows)}, {begun, float64(m.StateBegun)}, {stateBytes, float64(m.StateBytes)},
		{queueRequests, float64(m.QueueLength)}, {slots, float64(m.Slots)}, {slotsUnleased, float64(m.SlotsFree)},
		{clients, float64(m.Clients)}, {ready, float64(m.ReadyWorkers)}, {attached, float64(m.WorkersAttached)},
		{lost, float64(m.WorkersLost)}, {suspended, float64(m.WorkersSuspended)},
		{hung, float64(m.WorkersHung)}, {offenders, float64(m.Offenders)}, {maxBatch, float64(m.MaxBatchSize)},
		{waitTime, m.WaitTimeMS / 1e3},
	} {
		put(v.is, v.value, m.Name)
	}
	for _, code := range status.All() { // a rate needs the 0 of ends that have not happened
		if n := m.Ended[code.Name()]; n > 0 || code == status.OK || code.Group() == status.Ends {
			put(ended, float64(n), m.Name, code.Name())
		}
	}
	for reason, n := range m.Reasons {
		put(dispatched, float64(n), m.Name, reason)
	}
	for state, n := range map[string]int{"queued": m.SlotsQueued, "running": m.SlotsRunning, "held": m.SlotsHeld} {
		put(slotsUsed, float64(n), m.Name, state)
	}
	if goal, err := policy.ParseDuration(m.Policy["latency_goal"]); err == nil && goal > 0 {
		put(latencyGoal, goal.Seconds(), m.Name)
	}
	if s := m.Staffing; s != nil {
		put(awake, number(s.State == "awake"), m.Name)
		put(wakes, float64(s.Wakes), m.Name)
		put(wakesFailed, float64(s.FailedWakes), m.Name)
		put(wakeTime, s.WakeMS/1e3, m.Name)
		for _, b := range s.Memory {
			put(gpuMemory, float64(b.Bytes)*number(b.Held), m.Name, strconv.Itoa(b.GPU))
		}
	}
	states := map[string]int{"idle": 0, "busy": 0, "suspended": 0, "dying": 0, "quarantined": 0}
	for _, w := range m.Workers {
		states[w.State]++
	}
	for state, n := range states {
		put(workers, float64(n), m.Name, state)
	}
	inUse, all, went, rows := 0, 0, uint64(0), uint64(0)
	for i := range m.Workers {
		inUse, all = inUse+m.Workers[i].LanesInUse(), all+m.Workers[i].Lanes
		if w := &m.Workers[i]; w.Rounds > 0 {
			went, rows = went+w.Rounds, rows+w.Batches
		}
	}
	put(lanes, float64(inUse), m.Name, "busy")
	put(lanes, float64(all-inUse), m.Name, "free")
	if went > 0 {
		put(rounds, float64(went)/float64(max(rows, 1)), m.Name)
	}
	collectWorkers(put, m)
	for _, h := range []struct {
		is  *metric
		has *stats.Histogram
	}{{total, &m.Histograms.Total}, {queue, &m.Histograms.Queue}, {handover, &m.Histograms.Dispatch}, {compute, &m.Histograms.Compute}} {
		ch <- prometheus.MustNewConstHistogram(h.is.desc, h.has.Count, h.has.SumS, durationBuckets(h.has), valid([]string{m.Name})...)
	}
	ch <- prometheus.MustNewConstHistogram(batchRows.desc, m.Batches, float64(m.Rows), rowBuckets(m), valid([]string{m.Name})...)
}

func collectWorkers(put func(m *metric, value float64, labels ...string), m *stats.Model) {
	type key struct{ name, gpu string }
	busy, done := map[key]float64{}, map[key]float64{}
	for _, w := range m.Workers {
		k := key{w.Name, w.GPU}
		busy[k] += w.BusyS
		done[k] += float64(w.Batches)
	}
	for k, v := range busy {
		put(workerBusy, v, m.Name, k.name, k.gpu)
		put(workerBatches, done[k], m.Name, k.name, k.gpu)
	}
}

// durationBounds are two per doubling, from 8 µs to over a minute. Each is a bound of
// the broker's buckets, so that counts are exact.
var durationBounds = func() (list []time.Duration) {
	for d := time.Duration(1 << 13); d <= 1<<36; d *= 2 {
		list = append(list, d, d+d/2)
	}
	return list
}()

// durationBuckets adds up the broker's buckets: Prometheus counts all durations up
// to each bound.
func durationBuckets(h *stats.Histogram) map[float64]uint64 {
	out := map[float64]uint64{}
	n, at := uint64(0), 0
	for _, bound := range durationBounds {
		for ; at < len(h.Buckets) && h.Buckets[at].UpperS <= bound.Seconds(); at++ {
			n += h.Buckets[at].Count
		}
		out[bound.Seconds()] = n
	}
	return out
}

// rowBuckets are powers of two up to the largest batch.
func rowBuckets(m *stats.Model) map[float64]uint64 {
	sizes := slices.Sorted(maps.Keys(m.BatchSize.Histogram))
	largest := m.MaxBatchSize
	if len(sizes) > 0 {
		largest = max(largest, sizes[len(sizes)-1])
	}
	out := map[float64]uint64{}
	n, at := uint64(0), 0
	for bound := 1; ; bound *= 2 {
		for ; at < len(sizes) && sizes[at] <= bound; at++ {
			n += m.BatchSize.Histogram[sizes[at]]
		}
		out[float64(bound)] = n
		if bound >= largest {
			return out
		}
	}
}

// valid makes labels UTF-8, as Prometheus wants: names of peers may be any bytes.
func valid(labels []string) []string {
	out := make([]string, len(labels))
	for i, l := range labels {
		out[i] = strings.ToValidUTF8(l, "?")
	}
	return out
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
