// SPDX-License-Identifier: Apache-2.0

package core

import (
	"context"
	"errors"
	"maps"
	"slices"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

const (
	serverName   = "ringbatch"
	platform     = "ringbatch"
	modelVersion = "1" // a ring has one version of its model
)

func (g *Gateway) ServerMetadata() *oip.ServerMetadataResponse {
	extensions := []string{"binary_tensor_data", "model_configuration", "model_repository", "schedule_policy", "sequence",
		"sequence(string_id)", "statistics", oip.RequestsParameter}
	if g.Regions.on {
		extensions = append(extensions, "system_shared_memory")
	}
	return &oip.ServerMetadataResponse{Name: serverName, Version: g.Cfg.Version, Extensions: extensions}
}

// Metadata describes the model, under its alias as if that is given.
func (k *Model) Metadata(as *route) *oip.ModelMetadataResponse {
	side := func(specs []tensor.Spec) (list []*oip.ModelMetadataResponse_TensorMetadata) {
		for i := range specs {
			list = append(list, &oip.ModelMetadataResponse_TensorMetadata{
				Name: specs[i].Name, Datatype: oip.TypeName(specs[i].DType), Shape: oip.WireShape(&specs[i]),
			})
		}
		return list
	}
	name, versions := k.Name, []string{modelVersion}
	if as != nil {
		name, versions = as.Name, as.versions()
	}
	return &oip.ModelMetadataResponse{Name: name, Versions: versions, Platform: platform, Inputs: side(k.Sig.Inputs),
		Outputs: side(k.Sig.Outputs)}
}

func (k *Model) Config() *oip.ModelConfig {
	info := k.info.Load()
	c := &oip.ModelConfig{
		Name: k.Name, Platform: platform, Backend: platform, MaxBatchSize: int32(info.settings.MaxBatchSize),
		SchedulingChoice:       &oip.ModelConfig_DynamicBatching{DynamicBatching: k.batching(info)},
		ModelTransactionPolicy: &oip.ModelTransactionPolicy{},
	}
	if len(k.Sig.State) > 0 { // tools look for it before they send sequences
		c.SchedulingChoice = &oip.ModelConfig_SequenceBatching{SequenceBatching: &oip.ModelSequenceBatching{
			MaxSequenceIdleMicroseconds: uint64(k.G.Cfg.SequenceIdle.Microseconds())}}
	}
	if info.workers > 0 {
		c.InstanceGroup = []*oip.ModelInstanceGroup{{Name: k.Name, Count: int32(info.workers), Kind: oip.ModelInstanceGroup_KIND_MODEL}}
	}
	for i := range k.Sig.Inputs {
		spec := &k.Sig.Inputs[i]
		c.Input = append(c.Input, &oip.ModelInput{Name: spec.Name, DataType: oip.ConfigTypes[spec.DType], Dims: oip.RowShape(spec)})
	}
	for i := range k.Sig.Outputs {
		spec := &k.Sig.Outputs[i]
		c.Output = append(c.Output, &oip.ModelOutput{Name: spec.Name, DataType: oip.ConfigTypes[spec.DType], Dims: oip.RowShape(spec)})
	}
	return c
}

// batching translates the policy into Triton's settings.
func (k *Model) batching(info *modelInfo) *oip.ModelDynamicBatching {
	s := info.settings
	b := &oip.ModelDynamicBatching{PreserveOrdering: s.PreserveOrder, MaxQueueDelayMicroseconds: uint64(max(0, s.WaitTime).Microseconds())}
	for _, n := range s.PreferredBatchSizes {
		b.PreferredBatchSize = append(b.PreferredBatchSize, int32(n))
	}
	if n := s.LevelCount(); n > 1 { // Triton counts them from 1
		b.PriorityLevels, b.DefaultPriorityLevel = uint64(n), uint64(s.DefaultPriority+1)
	}
	return b
}

// Load wakes a model, as its next request would.
func (g *Gateway) Load(ctx context.Context, name string, parameters int) error {
	k, _, err := g.Models.About(ctx, name, "")
	switch {
	case err != nil:
		return err
	case parameters > 0:
		return errNoParameters
	}
	defer g.Models.refreshSoon(ctx) // so that its callers see the new state
	if err = g.admin.Wake(ctx, k.Name); errors.Is(err, status.ErrInvalid) && k.ready() {
		return nil // the broker does not start its workers, and they are there
	}
	return err
}

// Unload has a model sleep. A request wakes it again.
func (g *Gateway) Unload(ctx context.Context, name string) error {
	k, _, err := g.Models.About(ctx, name, "")
	switch {
	case err != nil:
		return err
	case g.Cfg.TokenFile != "" || g.Cfg.ClientCAFile != "":
		return errNoUnloading
	}
	defer g.Models.refreshSoon(ctx)
	return g.admin.Sleep(ctx, k.Name)
}

func (g *Gateway) Index() *oip.RepositoryIndexResponse {
	all := &oip.RepositoryIndexResponse{}
	add := func(name, version string, k *Model) {
		m := &oip.RepositoryIndexResponse_ModelIndex{Name: name, Version: version, State: "READY"}
		if k == nil || !k.ready() {
			m.State, m.Reason = "UNAVAILABLE", "no worker is attached"
			if k != nil && k.info.Load().notReady != "" {
				m.Reason = k.info.Load().notReady
			}
		} else if k.info.Load().asleep {
			m.Reason = "asleep: a request starts its workers"
		}
		all.Models = append(all.Models, m)
	}
	for _, k := range g.Models.List() {
		add(k.Name, modelVersion, k)
	}
	routes := *g.Models.routes.Load()
	for _, name := range slices.Sorted(maps.Keys(routes)) {
		for i, version := range routes[name].versions() {
			add(name, version, routes[name].to[i])
		}
	}
	return all
}
