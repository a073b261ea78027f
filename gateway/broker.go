package gateway

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/tensor"
)

// What the gateway asks the broker, beside inferring.

func listModels(ctx context.Context, socket string) ([]modelInfo, error) {
	rep, err := attach.CallOnce(ctx, control.SocketPath(socket), &control.Request{Op: control.OpModels})
	if err != nil {
		return nil, err
	}
	var list []modelInfo
	for _, m := range rep.Models {
		sig, err := tensor.ParseSignature(m.Inputs, m.Outputs)
		if err != nil {
			return nil, fmt.Errorf("model %s: %w", m.Name, err)
		}
		p := &m.Policy
		list = append(list, modelInfo{
			name: m.Name, signature: sig, workers: m.Workers, maxBatchSize: max(1, p.MaxBatchSize), preferred: p.Preferred,
			waitTime: max(0, time.Duration(p.WaitTime)), preserveOrder: p.PreserveOrder, levels: max(1, len(p.Levels)), default_: p.DefaultLevel,
		})
	}
	return list, nil
}

// batches is what the broker counts of a model: of all its clients.
type batches struct {
	Name      string `json:"name"`
	Rows      uint64 `json:"rows"`
	Batches   uint64 `json:"batches"`
	BatchSize struct {
		Histogram map[int]uint64 `json:"histogram"`
	} `json:"batch_size"`
}

func countBatches(ctx context.Context, socket string) (map[string]*batches, error) {
	rep, err := attach.CallOnce(ctx, control.SocketPath(socket), &control.Request{Op: control.OpStats})
	if err != nil {
		return nil, err
	}
	var s struct {
		Models []batches `json:"models"`
	}
	if err := json.Unmarshal(rep.Stats, &s); err != nil {
		return nil, fmt.Errorf("statistics: %w", err)
	}
	all := map[string]*batches{}
	for i := range s.Models {
		all[s.Models[i].Name] = &s.Models[i]
	}
	return all, nil
}
