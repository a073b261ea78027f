// SPDX-License-Identifier: Apache-2.0

package core

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/singleflight"
	"google.golang.org/grpc/codes"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// models are the served models of the broker. They come and go while the gateway
// runs; a lookup takes no lock.
type models struct {
	g      *Gateway
	byName atomic.Pointer[map[string]*Model]
	routes atomic.Pointer[map[string]*route] // by alias
	broker atomic.Pointer[error]             // of the last question to the broker; nil in it: it answered

	asking sync.Mutex // guards asked and epoch, and one question at a time
	asked  time.Time
	epoch  uint64 // of the broker that answered; 0: none has
	// Workers may attach again until then, after a restart of the broker; nil: there
	// was none.
	workersUntil atomic.Pointer[time.Time]
}

// Model is one model, for as long as its signature stays the same.
type Model struct {
	G    *Gateway
	Name string
	Sig  tensor.Signature
	info atomic.Pointer[modelInfo]

	variableInputs int   // variable dimensions of all the inputs
	strange        error // for every request: the protocol lacks a type
	counts         counters

	// Requests of one row, of several rows, and of relays have separate clients: among
	// single rows a request for many consecutive slots would wait long. Sequences keep
	// their slots.
	single, many, relayed, sequences lane
	suspects                         suspects
	openSequences                    int  // under G.sequences.mu
	gone                             bool // Close was called; under G.sequences.mu
	load                             load
}

// modelInfo may change while the model stays.
type modelInfo struct {
	settings *policy.Settings
	workers  int
	ready    bool // a worker is ready, or a request starts one
	asleep   bool
	notReady string // why no worker is ready
}

func (m *models) newInfo(b *admin.Model) *modelInfo {
	s, err := b.Policy.Resolve(b.Signature.Inputs)
	if err != nil { // a broker of another release
		m.g.Log.Warn("the broker's policy is not understood, defaults are told instead", "model", b.Name, "error", err)
		s, _ = policy.Policy{}.Resolve(b.Signature.Inputs)
	}
	return &modelInfo{settings: &s, workers: b.Workers, ready: b.Ready > 0 || b.Asleep, asleep: b.Asleep, notReady: b.NotReady}
}

// NewModel makes a model from the broker's listing.
func NewModel(g *Gateway, b *admin.Model) *Model {
	k := &Model{G: g, Name: b.Name, Sig: b.Signature, variableInputs: tensor.VariableDims(b.Signature.Inputs)}
	k.info.Store(g.Models.newInfo(b))
	for _, t := range slices.Concat(k.Sig.Inputs, k.Sig.Outputs) {
		if oip.TypeName(t.DType) == "?" {
			k.strange = Refuse(http.StatusNotImplemented, codes.Unimplemented,
				"model %q has %s, and the Open Inference Protocol has no such type: call it on its host", k.Name, &t)
		}
	}
	return k
}

func newModels(g *Gateway) *models {
	m := &models{g: g}
	m.byName.Store(&map[string]*Model{})
	m.routes.Store(&map[string]*route{})
	never := error(status.ErrNoBroker)
	m.broker.Store(&never)
	return m
}

func (m *models) watch(ctx context.Context) {
	var known uint64
	for ctx.Err() == nil {
		changed, cancel := context.WithTimeout(ctx, modelsInterval)
		now, err := m.g.admin.Changed(changed, known)
		cancel()
		m.refreshSoon(ctx) // also after a timeout: a policy may have been set
		if err == nil {
			known = now
		} else if !errors.Is(err, context.DeadlineExceeded) { // no broker
			select {
			case <-ctx.Done():
			case <-time.After(noBrokerInterval):
			}
		}
	}
}

// refreshSoon asks the broker, at the earliest lookupInterval after the last question.
func (m *models) refreshSoon(ctx context.Context) {
	m.asking.Lock()
	last := m.asked
	m.asking.Unlock()
	select {
	case <-ctx.Done():
		return
	case <-time.After(time.Until(last.Add(lookupInterval))):
	}
	m.asking.Lock()
	defer m.asking.Unlock()
	m.ask(ctx)
}

// refresh asks the broker, unless the last question is less than lookupInterval ago.
func (m *models) refresh(ctx context.Context) {
	m.asking.Lock()
	defer m.asking.Unlock()
	if time.Since(m.asked) < lookupInterval {
		return
	}
	// The answer is for all callers: the end of this one must not look like a broker
	// that does not answer.
	m.ask(context.WithoutCancel(ctx))
}

// ask updates models and routes. The caller holds asking.
func (m *models) ask(ctx context.Context) {
	var has admin.Listing
	err := askTwice(ctx, func(ctx context.Context) (err error) {
		has, err = m.g.admin.List(ctx)
		return err
	})
	m.asked = time.Now()
	m.broker.Store(&err)
	defer m.g.updateHealth()
	if err != nil {
		return // the models stay for the broker's return
	}
	m.noteRestart(&has)
	old := *m.byName.Load()
	next, targets := make(map[string]*Model, len(has.Models)), m.targetsOf(has.Aliases)
	for i := range has.Models {
		b := &has.Models[i]
		if !m.serves(b.Name) && !targets[b.Name] {
			continue
		}
		k := old[b.Name]
		if k == nil || !k.Sig.Equal(&b.Signature) {
			k = NewModel(m.g, b)
		}
		k.info.Store(m.newInfo(b))
		next[b.Name] = k
	}
	m.byName.Store(&next)
	routes := m.newRoutes(has.Aliases, next)
	m.routes.Store(&routes)
	for name, k := range old {
		if next[name] != k {
			go k.Close()
		}
	}
}

// askTwice asks the broker, and after a timeout once more: this machine may have
// stood still.
func askTwice(ctx context.Context, ask func(context.Context) error) (err error) {
	for range 2 {
		once, cancel := context.WithTimeout(ctx, brokerPatience)
		err = ask(once)
		late := once.Err() != nil
		cancel()
		if err == nil || !late || ctx.Err() != nil {
			break
		}
	}
	return err
}

// Get finds the model for a request, and its alias if the name is one.
func (m *models) Get(ctx context.Context, name, version string) (*Model, *route, error) {
	return m.look(ctx, name, version, true)
}

func (m *models) look(ctx context.Context, name, version string, turn bool) (*Model, *route, error) {
	k, as := m.find(name, version, turn)
	if k == nil {
		m.refresh(ctx) // the model may be new
		k, as = m.find(name, version, turn)
	}
	if k != nil {
		if k.strange != nil {
			return nil, nil, k.strange
		}
		return k, as, nil
	}
	if err := *m.broker.Load(); err != nil {
		return nil, nil, err
	}
	if err := m.awaited(name); err != nil {
		return nil, nil, err
	}
	if version != "" {
		has := []string{modelVersion}
		if r := (*m.routes.Load())[name]; r != nil {
			has = r.versions()
		} else if (*m.byName.Load())[name] == nil {
			has = nil
		}
		if has != nil {
			return nil, nil, Refuse(http.StatusNotFound, codes.NotFound, "model %q has version %s only, not %q", name,
				strings.Join(has, ", "), version)
		}
	}
	return nil, nil, Refuse(http.StatusNotFound, codes.NotFound, "Request for unknown model: no model %q is served here", name) // as Triton begins
}

// List returns all models, sorted by name.
func (m *models) List() []*Model {
	var all []*Model
	for _, k := range *m.byName.Load() {
		all = append(all, k)
	}
	slices.SortFunc(all, func(x, y *Model) int { return strings.Compare(x.Name, y.Name) })
	return all
}

// ready reports whether a request would find a ready worker, or start one.
func (k *Model) ready() bool {
	return *k.G.Models.broker.Load() == nil && k.info.Load().ready
}

// Close ends the clients. That of sequences ends with the last sequence.
func (k *Model) Close() {
	k.single.close()
	k.many.close()
	k.relayed.close()
	for i := range k.suspects.lanes {
		k.suspects.lanes[i].close()
	}
	s := &k.G.sequences
	s.mu.Lock()
	k.gone = true
	idle := k.openSequences == 0
	s.mu.Unlock()
	if idle {
		k.sequences.close()
	}
}

// lane is a client of one model, dialled when it is first needed.
type lane struct {
	live   atomic.Pointer[attachment]
	dials  singleflight.Group
	change rarely     // see replace
	mu     sync.Mutex // live does not change after closed
	closed bool
	shares shares
}

// client enters the lane's client; leave follows. The callers who need it at once share
// one attempt to dial, which goes on when one of them gives up.
func (l *lane) client(ctx context.Context, k *Model, window int) (*attachment, error) {
	for {
		if a := l.live.Load(); a == nil {
			dialled := l.dials.DoChan("", func() (any, error) { return l.dial(k, window) })
			select {
			case d := <-dialled:
				if d.Err != nil {
					return nil, d.Err
				}
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		} else if a.calls.Add(1); !a.retired.Load() {
			return a, nil
		} else { // replaced meanwhile
			a.leave()
		}
	}
}

func (l *lane) dial(k *Model, window int) (*attachment, error) {
	gone := fmt.Errorf("%w: model %q is gone", status.ErrUnknownModel, k.Name)
	l.mu.Lock()
	c, closed := l.live.Load(), l.closed
	l.mu.Unlock()
	switch {
	case closed:
		return nil, gone
	case c != nil: // another attempt has just ended
		return c, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), k.G.Cfg.ClaimWait)
	defer cancel()
	c, err := k.dial(ctx, window)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		go c.Close()
		return nil, gone
	}
	l.live.Store(c)
	return c, nil
}

// dial connects a client. It asks for a large window, and accepts a batch's slots
// where the ring is full or the gateway's quota is smaller.
func (k *Model) dial(ctx context.Context, window int) (*attachment, error) {
	least := min(window, k.info.Load().settings.MaxBatchSize)
	c, err := client.Dial(ctx, k.Name, client.WithSocket(k.G.Cfg.Socket), client.WithName("gateway"), client.WithWindow(window),
		client.WithLeastWindow(least))
	if err != nil {
		return nil, err
	}
	if now := c.Model().Signature; !k.Sig.Equal(&now) { // calls were checked against k's
		c.Close()
		return nil, fmt.Errorf("%w: model %q is %s now, it was %s", status.ErrSignatureMismatch, k.Name, &now, &k.Sig)
	}
	return &attachment{Client: c}, nil
}

// attachment is a lane's client, and counts the calls that use it.
type attachment struct {
	*client.Client
	calls   atomic.Int64
	retired atomic.Bool // to be closed after its last call
}

func (a *attachment) leave() {
	if a.calls.Add(-1) == 0 && a.retired.Load() {
		go a.Close()
	}
}

// replace makes later calls use a new client, unless the ring has no room for it. The calls
// of the old one go on.
func (l *lane) replace(k *Model, old *attachment, window int) {
	ctx, cancel := context.WithTimeout(context.Background(), k.G.Cfg.ClaimWait)
	defer cancel()
	c, err := k.dial(ctx, window)
	if err != nil {
		return
	}
	retired := c
	l.mu.Lock()
	if !l.closed && l.live.CompareAndSwap(old, c) {
		retired = old
	}
	l.mu.Unlock()
	retired.calls.Add(1)
	retired.retired.Store(true)
	retired.leave()
}

// forgetAfter drops a client after an error that says that its model came back as another one.
func (l *lane) forgetAfter(err error, a *attachment) {
	if (errors.Is(err, status.ErrSignatureMismatch) || errors.Is(err, status.ErrClosed)) && l.live.CompareAndSwap(a, nil) {
		go a.Close()
	}
}

func (l *lane) close() {
	l.mu.Lock()
	l.closed = true
	c := l.live.Swap(nil)
	l.mu.Unlock()
	if c != nil {
		_ = c.Close()
	}
}

// lane returns the lane for a request of that many rows, and its window.
func (k *Model) lane(rows int) (*lane, int) {
	info := k.info.Load()
	if k.G.Cfg.Window > 0 {
		if rows == 1 {
			return &k.single, k.G.Cfg.Window
		}
		return &k.many, max(k.G.Cfg.Window, info.settings.MaxBatchSize)
	}
	row := 1
	for _, side := range [][]tensor.Spec{k.Sig.Inputs, k.Sig.Outputs} {
		for _, spec := range side {
			row += spec.RowBytes()
		}
	}
	lanes := 3
	for i := range k.Sig.State {
		row += 2 * k.Sig.State[i].RowBytes()
		lanes = 4
	}
	batch := info.settings.MaxBatchSize
	window, most := min(max(windowBytes/row, 4*batch), maxWindow), math.MaxInt
	if slots := info.settings.Slots; slots > 0 { // the lanes share a small ring
		most = max(slots/lanes, batch)
	}
	if rows == 1 {
		return &k.single, min(window, most)
	}
	return &k.many, min(max(window, 4*batch), most)
}

// Default windows. Attaching touches a window's memory.
const (
	windowBytes = 64 << 20
	maxWindow   = 512 // slots
)

// noteRestart gives workers time to attach again if the broker drains or is a new
// one. Models that only workers declare are gone until then. The caller holds
// asking.
func (m *models) noteRestart(has *admin.Listing) {
	if has.Draining || m.epoch != 0 && m.epoch != has.Epoch {
		until := time.Now().Add(m.g.Cfg.Pace.Workers)
		m.workersUntil.Store(&until)
	}
	m.epoch = has.Epoch
}

// awaited returns an error that passes while workers may still attach again after
// a restart of the broker, else nil. The model is not there now.
func (m *models) awaited(name string) error {
	if until := m.workersUntil.Load(); until == nil || time.Now().After(*until) {
		return nil
	}
	return Refuse(http.StatusServiceUnavailable, codes.Unavailable,
		"model %q is not back yet: the broker was restarted, and its workers have not attached again", name)
}
