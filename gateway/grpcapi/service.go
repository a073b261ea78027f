// SPDX-License-Identifier: Apache-2.0

package grpcapi

import (
	"context"

	"google.golang.org/grpc/codes"

	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
)

func (d *rpcDoor) ServerLive(context.Context, *oip.ServerLiveRequest) (*oip.ServerLiveResponse, error) {
	return &oip.ServerLiveResponse{Live: d.g.Live() == nil}, nil
}

func (d *rpcDoor) ServerReady(context.Context, *oip.ServerReadyRequest) (*oip.ServerReadyResponse, error) {
	return &oip.ServerReadyResponse{Ready: d.g.Ready() == nil}, nil
}

func (d *rpcDoor) ModelReady(ctx context.Context, r *oip.ModelReadyRequest) (*oip.ModelReadyResponse, error) {
	k, _, err := d.g.Models.About(ctx, r.Name, r.Version)
	if core.MeaningOf(err).GRPC == codes.NotFound { // callers wait for a model by this call
		return &oip.ModelReadyResponse{}, nil
	}
	if err != nil {
		return nil, err
	}
	return &oip.ModelReadyResponse{Ready: d.g.ModelReady(k) == nil}, nil
}

func (d *rpcDoor) ServerMetadata(context.Context, *oip.ServerMetadataRequest) (*oip.ServerMetadataResponse, error) {
	return d.g.ServerMetadata(), nil
}

func (d *rpcDoor) ModelMetadata(ctx context.Context, r *oip.ModelMetadataRequest) (*oip.ModelMetadataResponse, error) {
	k, as, err := d.g.Models.About(ctx, r.Name, r.Version)
	if err != nil {
		return nil, err
	}
	sendSignature(ctx, k)
	return k.Metadata(as), nil
}

func (d *rpcDoor) ModelConfig(ctx context.Context, r *oip.ModelConfigRequest) (*oip.ModelConfigResponse, error) {
	k, _, err := d.g.Models.About(ctx, r.Name, r.Version)
	if err != nil {
		return nil, err
	}
	return &oip.ModelConfigResponse{Config: k.Config()}, nil
}

func (d *rpcDoor) ModelStatistics(ctx context.Context, r *oip.ModelStatisticsRequest) (*oip.ModelStatisticsResponse, error) {
	return d.g.Statistics(ctx, r.Name, r.Version)
}

func (d *rpcDoor) RepositoryIndex(context.Context, *oip.RepositoryIndexRequest) (*oip.RepositoryIndexResponse, error) {
	return d.g.Index(), nil
}

func (d *rpcDoor) RepositoryModelLoad(ctx context.Context, r *oip.RepositoryModelLoadRequest) (*oip.RepositoryModelLoadResponse, error) {
	return &oip.RepositoryModelLoadResponse{}, d.g.Load(ctx, r.ModelName, len(r.Parameters))
}

func (d *rpcDoor) RepositoryModelUnload(ctx context.Context,
	r *oip.RepositoryModelUnloadRequest) (*oip.RepositoryModelUnloadResponse, error) {
	return &oip.RepositoryModelUnloadResponse{}, d.g.Unload(ctx, r.ModelName)
}

func (d *rpcDoor) SystemSharedMemoryStatus(ctx context.Context,
	r *oip.SystemSharedMemoryStatusRequest) (*oip.SystemSharedMemoryStatusResponse, error) {
	who, _, err := d.rpcCall(ctx)
	if err != nil {
		return nil, err
	}
	list, err := d.g.Regions.Status(who, r.Name)
	if err != nil {
		return nil, err
	}
	all := &oip.SystemSharedMemoryStatusResponse{Regions: map[string]*oip.SystemSharedMemoryStatusResponse_RegionStatus{}}
	for _, k := range list {
		all.Regions[k.Name] = k.Message()
	}
	return all, nil
}

func (d *rpcDoor) SystemSharedMemoryRegister(ctx context.Context,
	r *oip.SystemSharedMemoryRegisterRequest) (*oip.SystemSharedMemoryRegisterResponse, error) {
	who, _, err := d.rpcCall(ctx)
	if err != nil {
		return nil, err
	}
	return &oip.SystemSharedMemoryRegisterResponse{}, d.g.Regions.Register(who, r.Name, r.Key, r.Offset, r.ByteSize)
}

func (d *rpcDoor) SystemSharedMemoryUnregister(ctx context.Context,
	r *oip.SystemSharedMemoryUnregisterRequest) (*oip.SystemSharedMemoryUnregisterResponse, error) {
	who, _, err := d.rpcCall(ctx)
	if err != nil {
		return nil, err
	}
	return &oip.SystemSharedMemoryUnregisterResponse{}, d.g.Regions.Unregister(who, r.Name)
}

func (d *rpcDoor) CudaSharedMemoryStatus(context.Context, *oip.CudaSharedMemoryStatusRequest) (*oip.CudaSharedMemoryStatusResponse, error) {
	return &oip.CudaSharedMemoryStatusResponse{}, nil
}

func (d *rpcDoor) CudaSharedMemoryRegister(context.Context,
	*oip.CudaSharedMemoryRegisterRequest) (*oip.CudaSharedMemoryRegisterResponse, error) {
	return nil, core.ErrNoCUDA
}

func (d *rpcDoor) CudaSharedMemoryUnregister(context.Context,
	*oip.CudaSharedMemoryUnregisterRequest) (*oip.CudaSharedMemoryUnregisterResponse, error) {
	return &oip.CudaSharedMemoryUnregisterResponse{}, nil
}
