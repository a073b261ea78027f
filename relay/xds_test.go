// SPDX-License-Identifier: Apache-2.0

//go:build xds

package relay

import (
	"context"
	"fmt"
	"net"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	clusterpb "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corepb "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointpb "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	listenerpb "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routepb "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	routerpb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	managerpb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	discoverypb "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/ringbatch/ringbatch/gateway"
	"github.com/ringbatch/ringbatch/worker"
)

// controlPlane answers ADS, the one stream that an xDS client asks everything
// by: a listener and its cluster that never change, and the hosts that do.
type controlPlane struct {
	discoverypb.UnimplementedAggregatedDiscoveryServiceServer
	mu      sync.Mutex
	hosts   []string
	version int
	changed chan struct{}
}

const (
	listenerType = "type.googleapis.com/envoy.config.listener.v3.Listener"
	clusterType  = "type.googleapis.com/envoy.config.cluster.v3.Cluster"
	endpointType = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
)

func newControlPlane(t *testing.T, hosts ...string) *controlPlane {
	t.Helper()
	file := os.Getenv("GRPC_XDS_BOOTSTRAP") // gRPC has read its name by now
	if file == "" {
		t.Skip("GRPC_XDS_BOOTSTRAP names no file; make xds-test does")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	bootstrap := fmt.Sprintf(`{"xds_servers":[{"server_uri":%q,"channel_creds":[{"type":"insecure"}],"server_features":["xds_v3"]}],"node":{"id":"test"}}`, l.Addr())
	if err := os.WriteFile(file, []byte(bootstrap), 0o600); err != nil {
		t.Fatal(err)
	}
	p := &controlPlane{hosts: hosts, version: 1, changed: make(chan struct{})}
	s := grpc.NewServer()
	discoverypb.RegisterAggregatedDiscoveryServiceServer(s, p)
	go func() { _ = s.Serve(l) }()
	t.Cleanup(s.Stop)
	return p
}

// set tells the clients of other hosts.
func (p *controlPlane) set(hosts ...string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hosts, p.version = hosts, p.version+1
	close(p.changed)
	p.changed = make(chan struct{})
}

func (p *controlPlane) StreamAggregatedResources(s discoverypb.AggregatedDiscoveryService_StreamAggregatedResourcesServer) error {
	asked := make(chan *discoverypb.DiscoveryRequest)
	go func() {
		defer close(asked)
		for {
			r, err := s.Recv()
			if err != nil {
				return
			}
			select {
			case asked <- r:
			case <-s.Context().Done():
				return
			}
		}
	}()
	told := map[string]int{} // version, by type
	wanted := map[string]bool{}
	for {
		p.mu.Lock()
		changed := p.changed
		p.mu.Unlock()
		select {
		case r, ok := <-asked:
			if !ok {
				return nil
			}
			if r.ErrorDetail != nil {
				return fmt.Errorf("the client refuses %s: %s", r.TypeUrl, r.ErrorDetail.Message)
			}
			wanted[r.TypeUrl] = true
		case <-changed:
		}
		for _, kind := range []string{listenerType, clusterType, endpointType} {
			if !wanted[kind] {
				continue
			}
			m, version := p.resource(kind)
			if told[kind] == version {
				continue
			}
			told[kind] = version
			any, err := anypb.New(m)
			if err != nil {
				return err
			}
			if err := s.Send(&discoverypb.DiscoveryResponse{TypeUrl: kind, VersionInfo: strconv.Itoa(version), Nonce: strconv.Itoa(version), Resources: []*anypb.Any{any}}); err != nil {
				return err
			}
		}
	}
}

// resource is the one of a type, and its version.
func (p *controlPlane) resource(kind string) (proto.Message, int) {
	ads := &corepb.ConfigSource{ConfigSourceSpecifier: &corepb.ConfigSource_Ads{Ads: &corepb.AggregatedConfigSource{}}, ResourceApiVersion: corepb.ApiVersion_V3}
	switch kind {
	case listenerType:
		router, _ := anypb.New(&routerpb.Router{})
		manager, _ := anypb.New(&managerpb.HttpConnectionManager{
			RouteSpecifier: &managerpb.HttpConnectionManager_RouteConfig{RouteConfig: &routepb.RouteConfiguration{Name: "all", VirtualHosts: []*routepb.VirtualHost{{Name: "all", Domains: []string{"*"}, Routes: []*routepb.Route{{
				Match:  &routepb.RouteMatch{PathSpecifier: &routepb.RouteMatch_Prefix{}},
				Action: &routepb.Route_Route{Route: &routepb.RouteAction{ClusterSpecifier: &routepb.RouteAction_Cluster{Cluster: "gpus"}}}}}}}}},
			HttpFilters: []*managerpb.HttpFilter{{Name: "router", ConfigType: &managerpb.HttpFilter_TypedConfig{TypedConfig: router}}}})
		return &listenerpb.Listener{Name: "gpus", ApiListener: &listenerpb.ApiListener{ApiListener: manager}}, 1
	case clusterType:
		return &clusterpb.Cluster{Name: "gpus", ClusterDiscoveryType: &clusterpb.Cluster_Type{Type: clusterpb.Cluster_EDS}, LbPolicy: clusterpb.Cluster_ROUND_ROBIN,
			EdsClusterConfig: &clusterpb.Cluster_EdsClusterConfig{EdsConfig: ads}}, 1
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	all := &endpointpb.LocalityLbEndpoints{Locality: &corepb.Locality{Region: "here"}, LoadBalancingWeight: wrapperspb.UInt32(1)}
	for _, address := range p.hosts {
		host, port, _ := net.SplitHostPort(address)
		n, _ := strconv.Atoi(port)
		all.LbEndpoints = append(all.LbEndpoints, &endpointpb.LbEndpoint{HostIdentifier: &endpointpb.LbEndpoint_Endpoint{Endpoint: &endpointpb.Endpoint{
			Address: &corepb.Address{Address: &corepb.Address_SocketAddress{SocketAddress: &corepb.SocketAddress{Address: host, PortSpecifier: &corepb.SocketAddress_PortValue{PortValue: uint32(n)}}}}}}})
	}
	return &endpointpb.ClusterLoadAssignment{ClusterName: "gpus", Endpoints: []*endpointpb.LocalityLbEndpoints{all}}, p.version
}

func TestAnXdsControlPlaneSaysWhereTheHostsAre(t *testing.T) {
	sig := signature(t, "x:i32[1]", "y:i32[1]")
	var runs [3]atomic.Int32
	var all []*testHost
	for i := range runs {
		all = append(all, newHost(t, sig, func(ctx context.Context, b *worker.Batch) error {
			runs[i].Add(1)
			return double(ctx, b)
		}, func(c *gateway.Config) { c.DrainTime = 1 }))
	}
	p := newControlPlane(t, all[0].address, all[1].address)
	l := newLocal(t, func(c *Config) { c.Target = "xds:///gpus" })
	c := l.dial()
	send := func(n int) {
		t.Helper()
		for i := range int32(n) {
			q := commit(t, c, 2*i)[0]
			if err := q.Wait(soon(t)); err != nil || number(t, q) != 4*i {
				t.Fatalf("request %d: %v", i, err)
			}
			_ = q.Release()
		}
	}
	send(40)
	if runs[0].Load() == 0 || runs[1].Load() == 0 || runs[2].Load() != 0 {
		t.Errorf("batches went to %d, %d, %d", runs[0].Load(), runs[1].Load(), runs[2].Load())
	}

	// The control plane moves the work to a third host, and a host dies that it
	// still lists: nothing is lost.
	p.set(all[1].address, all[2].address)
	l.eventually("the third host has work", func() bool { send(1); return runs[2].Load() > 0 })
	all[1].stop()
	before := runs[1].Load()
	send(40)
	if runs[1].Load() != before {
		t.Error("a host that is gone ran a batch")
	}

	// One sentence for a request that fails there, as elsewhere.
	if q := commit(t, c, 5)[0]; q.Wait(soon(t)) == nil {
		t.Error("an odd number was doubled")
	}
}

func TestTheRouteOfAnXdsTargetIsTheControlPlanes(t *testing.T) {
	if err := Run(soon(t), Config{Model: "m", Target: "xds:///x", Route: Fill}); err == nil {
		t.Error("a route was taken")
	}
}
