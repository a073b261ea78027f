// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"time"

	"github.com/ringbatch/ringbatch/internal/progress"
)

// largeFigures: 602,112-byte inputs (an image of 3×224×224 floats) with 4 KB
// outputs, against the producers' own copies into the same slots.
type largeFigures struct {
	BytesPerS    float64   `json:"bytes_per_s"`
	CopyPerS     float64   `json:"copy_bytes_per_s"`
	RequestsPerS float64   `json:"requests_per_s"`
	Producers    int       `json:"producers"`
	InFlight     int       `json:"in_flight"`
	Rounds       []float64 `json:"rounds"`
}

const (
	largeProducers = 2
	largeInFlight  = 32
	// As in the small part, half of what is in flight makes a batch, and
	// waiting for it costs nothing: the producers are copying meanwhile.
	largeBatch = largeProducers * largeInFlight / 2
	largeWait  = 2 * time.Millisecond
)

func measureLarge(f *fleet, o transportOptions, say *progress.Line, r *transportReport) error {
	e, err := f.startEcho(1, echoJob{Model: "large", Inputs: []string{"x:u8[602112]"}, Outputs: []string{"y:u8[4096]"}, MaxBatch: largeBatch, WaitTime: largeWait, Slots: 2 * largeProducers * largeInFlight})
	if err != nil {
		return err
	}
	producers, err := f.startTransport(largeProducers, transportJob{Socket: e.socket, Model: "large", Window: largeInFlight, Sessions: 1})
	if err != nil {
		return err
	}
	fig := &largeFigures{Producers: largeProducers, InFlight: largeInFlight}
	var through, copies []float64
	for round := range o.Rounds + 1 {
		say.Say("large: round %d of %d", round+1, o.Rounds+1)
		rs, err := together(producers, transportOrder{Do: "stream"}, o.Round)
		if err != nil {
			return err
		}
		moved := total(rs).Bytes
		if rs, err = together(producers, transportOrder{Do: "copy"}, o.Round); err != nil {
			return err
		}
		copied := total(rs).Bytes
		if round > 0 {
			through, copies = append(through, float64(moved)/o.Round.Seconds()), append(copies, float64(copied)/o.Round.Seconds())
			fig.Rounds = append(fig.Rounds, float64(moved)/float64(copied))
		}
	}
	fig.BytesPerS, fig.CopyPerS = medianOf(through), medianOf(copies)
	fig.RequestsPerS = fig.BytesPerS / 602112
	r.Large, r.LargeRatio = fig, medianOf(fig.Rounds)
	r.check("large_ratio", r.LargeRatio, ">= 0.80", r.LargeRatio >= 0.80,
		"%.2f GB/s through the whole exchange (%s requests/s) / %.2f GB/s of copies alone, %d producers × %d slots; median of %d rounds",
		fig.BytesPerS/1e9, big(fig.RequestsPerS), fig.CopyPerS/1e9, largeProducers, largeInFlight, len(fig.Rounds))
	return nil
}
