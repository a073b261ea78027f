// SPDX-License-Identifier: Apache-2.0

package oip

import (
	"math"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
)

// LoadTrailer carries a call's load report, as ORCA (Open Request Cost Aggregation)
// defines it. Envoy and gRPC's balancers read it.
const LoadTrailer = "endpoint-load-metrics-bin"

// Load is a gateway's report of a model's load. On the wire it is an
// xds.data.orca.v3.OrcaLoadReport; the times are named metrics.
type Load struct {
	Utilization float64       // rows in flight ÷ rows of the workers' batches; above 1 rows wait
	PerSecond   float64       // rows answered
	Queue       time.Duration // of this call
	Compute     time.Duration // of this call
}

// Fields of OrcaLoadReport.
const (
	orcaRate        = 6
	orcaNamed       = 8
	orcaUtilization = 9

	queueMetric   = "ringbatch.queue_seconds"
	computeMetric = "ringbatch.compute_seconds"
)

// Append writes the report.
func (l *Load) Append(b []byte) []byte {
	b = appendDouble(b, orcaRate, l.PerSecond)
	for _, m := range []struct {
		name  string
		value time.Duration
	}{{queueMetric, l.Queue}, {computeMetric, l.Compute}} {
		entry := 2 + len(m.name) + 9
		b = protowire.AppendVarint(protowire.AppendTag(b, orcaNamed, protowire.BytesType), uint64(entry))
		b = protowire.AppendString(protowire.AppendTag(b, 1, protowire.BytesType), m.name)
		b = appendDouble(b, 2, m.value.Seconds())
	}
	return appendDouble(b, orcaUtilization, l.Utilization)
}

func appendDouble(b []byte, field protowire.Number, v float64) []byte {
	return protowire.AppendFixed64(protowire.AppendTag(b, field, protowire.Fixed64Type), math.Float64bits(v))
}

// ParseLoad decodes a report, and skips unknown fields. ok: there was a report.
func ParseLoad(b []byte) (l Load, ok bool) {
	err := EachField(b, func(field protowire.Number, _ protowire.Type, number uint64, bytes []byte) error {
		switch field {
		case orcaRate:
			l.PerSecond = sane(number)
		case orcaUtilization:
			l.Utilization = sane(number)
		case orcaNamed:
			var name string
			var value float64
			_ = EachField(bytes, func(field protowire.Number, _ protowire.Type, number uint64, bytes []byte) error {
				switch field {
				case 1:
					name = string(bytes)
				case 2:
					value = sane(number)
				}
				return nil
			})
			switch name {
			case queueMetric:
				l.Queue = time.Duration(min(value, 1e6) * float64(time.Second))
			case computeMetric:
				l.Compute = time.Duration(min(value, 1e6) * float64(time.Second))
			}
		}
		return nil
	})
	return l, err == nil && len(b) > 0
}

// sane returns a double of the report, and 0 for values that make no sense.
func sane(bits uint64) float64 {
	v := math.Float64frombits(bits)
	if math.IsNaN(v) || math.IsInf(v, 0) || v < 0 {
		return 0
	}
	return v
}
