// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/inside"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// relay is a running relay.
type relay struct {
	cfg     Config
	log     *slog.Logger
	conn    *grpc.ClientConn
	service oip.GRPCInferenceServiceClient
	codec   oip.Codec
	hosts   *hosts
	leases  atomic.Int64 // pieces of slots that the transport holds
	levels  int          // of the local model

	mu       sync.Mutex
	sig      *tensor.Signature // of the first host that answered
	maxBatch int
	known    chan struct{}          // closed when sig is set
	posted   map[*exchange]struct{} // messages without an answer
}

// Run relays until ctx ends, and then returns nil. It waits for a target that does
// not answer.
func Run(ctx context.Context, cfg Config) error {
	cfg.fill()
	if err := cfg.check(); err != nil {
		return err
	}
	register()
	r := &relay{cfg: cfg, log: cfg.Logger, codec: oip.NewCodec(), known: make(chan struct{}), posted: map[*exchange]struct{}{}}
	r.hosts = newHosts(cfg.Logger, cfg.InFlight)
	if err := r.connect(); err != nil {
		return err
	}
	defer r.conn.Close()
	life, stop := context.WithCancel(context.Background())
	defer stop()
	go every(life, sweepInterval, r.sweep)
	select {
	case <-ctx.Done():
		return nil
	case <-r.known:
	}
	if cfg.Started != nil {
		cfg.Started(r.sig, r.maxBatch)
	}
	_, lanes := r.hosts.state()
	return worker.KeepAttached(ctx, worker.Config{
		Model: cfg.Model, Signature: *r.sig, Socket: cfg.Socket, Name: cfg.Name, Depth: cfg.InFlight, Concurrency: max(1, min(lanes,
			cfg.InFlight)),
		Policy: r.policy(), WaitForBroker: cfg.WaitForBroker, Version: cfg.Version,
	}, r.serve)
}

// policy returns the user's policy, with the far side's batch size as the default.
func (r *relay) policy() policy.Policy {
	p := policy.New(policy.MaxBatchSize(r.maxBatch))
	for key, value := range r.cfg.Policy {
		p[key] = value
	}
	return p
}

func (r *relay) connect() error {
	creds, err := transport(&r.cfg, r.hosts)
	if err != nil {
		return err
	}
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(creds),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2,
			MaxDelay: time.Second}, MinConnectTimeout: 2 * time.Second}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 20 * time.Second, Timeout: 5 * time.Second, PermitWithoutStream: true}),
		grpc.WithInitialWindowSize(1 << 20), grpc.WithInitialConnWindowSize(8 << 20),
		grpc.WithIdleTimeout(0),
		grpc.WithDisableRetry(), // the relay's own leaves out canceled requests
	}
	if r.cfg.TokenFile != "" {
		t, err := newToken(&r.cfg)
		if err != nil {
			return err
		}
		options = append(options, grpc.WithPerRPCCredentials(t))
	}
	target := r.cfg.Target
	if list := r.cfg.list(); list != nil {
		m := manual.NewBuilderWithScheme("list")
		m.InitialState(resolver.State{Endpoints: endpoints(list)})
		options = append(options, grpc.WithResolvers(m))
		target = "list:///" + list[0]
	}
	r.hosts.check = r.checkHost
	options = append(options, grpc.WithDisableServiceConfig(),
		grpc.WithDefaultServiceConfig(`{"loadBalancingConfig": [{"`+policyName+`": {}}]}`))
	if r.conn, err = grpc.NewClient(target, options...); err != nil {
		return fmt.Errorf("target %q: %w", r.cfg.Target, err)
	}
	r.service = oip.NewGRPCInferenceServiceClient(r.conn)
	r.conn.Connect()
	return nil
}

// serve relays the batches of one attachment.
func (r *relay) serve(ctx context.Context, w *worker.Worker) error {
	in := inside.Of(ctx)
	settings := in.Settings()
	r.levels = settings.LevelCount()
	in.Polite() // the finishers need the cores
	r.hosts.mu.Lock()
	r.hosts.onLanes = in.SetLanes
	in.SetLanes(max(1, r.hosts.lanes))
	r.hosts.mu.Unlock()
	f := finishers{trips: make(chan *trip)}
	// The goroutine that takes a batch also sends it, so that a batch waits for no
	// other goroutine. When the relay stops, it finishes the taken batches; the
	// lease bounds that.
	var err error
	for b := (*worker.Batch)(nil); err == nil; {
		if b, err = w.Next(ctx); err == nil {
			t := newTrip(r, b, &settings)
			t.start()
			f.finish(t)
			letItBeWritten()
		}
	}
	f.wait()
	r.hosts.mu.Lock()
	r.hosts.onLanes = func(int) {}
	r.hosts.mu.Unlock()
	r.settle(in)
	return err
}

// finishers are goroutines that wait for answers, as many as were ever needed at
// once. A new goroutine for each batch would grow its stack again.
type finishers struct {
	trips chan *trip
	all   sync.WaitGroup
}

// finish hands the trip to a finisher, and does not wait.
func (f *finishers) finish(t *trip) {
	select {
	case f.trips <- t:
	default: // all are busy
		f.all.Go(func() {
			for more := true; more; t, more = <-f.trips {
				t.finish()
			}
		})
	}
}

// wait returns when all trips are finished.
func (f *finishers) wait() {
	close(f.trips)
	f.all.Wait()
}

// letItBeWritten runs gRPC's writing goroutine on this thread, which would sleep
// next; otherwise another thread has to wake up. It yields twice, because the
// writer itself yields once before a small write.
func letItBeWritten() {
	runtime.Gosched()
	runtime.Gosched()
}

// settle waits until the transport has freed the slots, which are unmapped next.
func (r *relay) settle(w inside.Worker) {
	for end := time.Now().Add(settleTime); r.leases.Load() > 0; time.Sleep(time.Millisecond) {
		runtime.GC() // frees buffers of broken connections
		if time.Now().After(end) {
			r.log.Warn("the transport still has buffers of the ring, it stays mapped", "buffers", r.leases.Load())
			w.Leave()
			w.Abandon()
			return
		}
	}
}

const settleTime = 5 * time.Second

var errNobodyWaits = errors.New("nobody waits for it any more")

// watch cancels an exchange when no client waits for its requests, until unwatch.
func (r *relay) watch(x *exchange) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.posted[x] = struct{}{}
}

func (r *relay) unwatch(x *exchange) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.posted, x)
}

// sweepInterval is how soon a host learns that a batch was canceled.
const sweepInterval = 10 * time.Millisecond

func (r *relay) sweep() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for x := range r.posted {
		if !slices.ContainsFunc(x.requests, x.t.b.Waiting) {
			x.cancel(errNobodyWaits)
		}
	}
}

// differs asks a host again for its signature, and leaves a host with another one.
func (r *relay) differs(h *host) bool {
	ctx, cancel := context.WithTimeout((&route{host: h}).to(context.Background()), r.cfg.CheckTimeout)
	defer cancel()
	err := r.checkModel(ctx, h)
	if err != nil {
		h.markUnusable(problem(err), false)
	}
	return err != nil
}
