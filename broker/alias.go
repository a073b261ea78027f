// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"

	"github.com/ringbatch/ringbatch/admin/alias"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/status"
	"golang.org/x/sys/unix"
)

// An alias is a name for models. Their shares divide a gateway's requests. A client
// on the ring gets a window of the model with the largest share, and is told to
// attach again when that is another model:
//
//	attach ──► chosen, reply sent ──► settled ── told ──► moving ──► gone
//
// A client that is told attaches again while its old session goes on, so that
// nothing is lost; then it leaves the old one.

const maxAliases = 256

// aliasEntry is one alias, and who attached to it. Under the registry's lock.
type aliasEntry struct {
	alias.Alias
	inFile    bool // the configuration names it
	followers []*follower
}

// follower is a client's session that began with an alias.
type follower struct {
	entry     *aliasEntry
	model     string
	signature string // it stays with models that have it, as long as there is one
	conn      *net.UnixConn
	follows   bool // it understands to be told; others are hung up on
	settled   bool // it has its reply
	moving    bool // it is to attach again
}

// move has the client attach again. The caller holds the registry's lock.
func (f *follower) move() {
	if f.moving = true; f.settled {
		f.tell()
	}
}

// tell never waits: the socket's buffer is empty, or the peer does not read it.
func (f *follower) tell() {
	raw, err := f.conn.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		if f.follows {
			err = unix.Sendto(int(fd), []byte{control.AttachAgain}, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, nil)
		}
		if !f.follows || err != nil {
			_ = unix.Shutdown(int(fd), unix.SHUT_RDWR)
		}
	})
}

// takeForClient finds the model that a client gets by a model's name or an
// alias, and keeps it until leave. f is not nil if it was an alias: settle or
// unfollow it. A client that was attached before says with which signature.
func (g *registry) takeForClient(name, signature string, follows bool, conn *net.UnixConn) (m *model, f *follower, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	entry := g.aliases[name]
	if entry == nil {
		if m = g.wait(name); m == nil {
			return nil, nil, g.unknown(name)
		}
		if signature != "" && signature != m.signature {
			return nil, nil, fmt.Errorf("%w: %q is %s, the client was attached to %s", status.ErrSignatureMismatch, name, m.signature, signature)
		}
		g.join(m)
		return m, nil, nil
	}
	for _, t := range entry.To {
		g.wait(t.Model)
	}
	if entry = g.aliases[name]; entry == nil { // while we waited
		return nil, nil, g.unknown(name)
	}
	t := g.chooseTarget(entry, signature)
	if t == nil {
		return nil, nil, g.misfit(entry, signature)
	}
	m = g.models[t.Model]
	g.join(m)
	f = &follower{entry: entry, model: t.Model, signature: m.signature, conn: conn, follows: follows}
	entry.followers = append(entry.followers, f)
	return m, f, nil
}

// chooseTarget returns the target with the largest share that a client may get: of
// its signature if it has one, and with workers if any such target has workers. nil
// if there is none.
func (g *registry) chooseTarget(e *aliasEntry, signature string) (best *alias.Target) {
	staffed := false // best has workers
	for i := range e.To {
		t := &e.To[i]
		m := g.models[t.Model]
		if m == nil || m.made != nil || signature != "" && signature != m.signature {
			continue
		}
		if now := m.staffed(); best == nil || now && !staffed || now == staffed && t.Share > best.Share {
			best, staffed = t, now
		}
	}
	return best
}

// misfit says why none of an alias's models will do.
func (g *registry) misfit(e *aliasEntry, signature string) error {
	var there []string
	for _, t := range e.To {
		if m := g.models[t.Model]; m != nil && m.made == nil {
			there = append(there, fmt.Sprintf("%q, which is %s", t.Model, m.signature))
		}
	}
	if len(there) == 0 {
		return fmt.Errorf("%w: %q is an alias of %s, and none of that is there yet", status.ErrUnknownModel, e.Name, &e.Alias)
	}
	return fmt.Errorf("%w: %q is an alias of %s; the client was attached to %s", status.ErrSignatureMismatch, e.Name, strings.Join(there, " and "), signature)
}

// count returns how many clients have the model by the alias.
func (e *aliasEntry) count(model string) (n int) {
	for _, f := range e.followers {
		if f.model == model && !f.moving {
			n++
		}
	}
	return n
}

// settle is called when a follower has its reply: from now on it can be told.
func (g *registry) settle(f *follower) {
	if f == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if f.settled = true; f.moving {
		f.tell()
	}
}

// unfollow ends what takeForClient began.
func (g *registry) unfollow(f *follower) {
	if f == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	e := f.entry
	if i := slices.Index(e.followers, f); i >= 0 {
		e.followers = slices.Delete(e.followers, i, i+1)
	}
}

// moveFollowers tells clients to move that have another model than chooseTarget's.
// The caller holds the lock.
func (g *registry) moveFollowers(e *aliasEntry) {
	if g.aliases[e.Name] != e || g.draining || g.chooseTarget(e, "") == nil {
		return // nothing to move to
	}
	for _, f := range e.followers {
		if t := g.chooseTarget(e, f.signature); !f.moving && (t == nil || t.Model != f.model) {
			f.move()
		}
	}
}

// moveAllFollowers is called when a model got its first worker or lost its last.
func (g *registry) moveAllFollowers() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, e := range g.aliases {
		g.moveFollowers(e)
	}
}

// checkAlias says why there cannot be such an alias. willBe are further models
// that are about to be declared. The caller holds the lock.
func (g *registry) checkAlias(a *alias.Alias, isAlias func(string) bool, willBe map[string]bool) error {
	if err := a.Check(); err != nil {
		return err
	}
	if g.models[a.Name] != nil || willBe[a.Name] {
		return fmt.Errorf("%w: alias %q: there is a model of that name; give the model another one, like %s@1", status.ErrInvalid, a.Name, a.Name)
	}
	for _, t := range a.To {
		if isAlias(t.Model) {
			return fmt.Errorf("%w: alias %q: %q is an alias itself; name the models that it stands for", status.ErrInvalid, a.Name, t.Model)
		}
	}
	return nil
}

// setAlias has a name stand for other models from now on. A client that attaches gets
// the new ones, and those who are attached are told to move.
func (g *registry) setAlias(a alias.Alias) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.checkAlias(&a, func(name string) bool { return g.aliases[name] != nil }, nil); err != nil {
		return err
	}
	for _, e := range g.aliases {
		if slices.ContainsFunc(e.To, func(t alias.Target) bool { return t.Model == a.Name }) {
			return fmt.Errorf("%w: alias %q: the alias %q stands for a model of that name", status.ErrInvalid, a.Name, e.Name)
		}
	}
	for _, t := range a.To {
		if m := g.models[t.Model]; m == nil || m.made != nil {
			return g.unknown(t.Model) // most often a typo
		}
	}
	if g.aliases[a.Name] == nil && len(g.aliases) >= maxAliases {
		return fmt.Errorf("%w: there are %d aliases, and no more may be; remove one", status.ErrQuota, len(g.aliases))
	}
	g.putAlias(a, false)
	return nil
}

// putAlias does it. The caller holds the lock.
func (g *registry) putAlias(a alias.Alias, inFile bool) {
	e := g.aliases[a.Name]
	if e == nil {
		e = &aliasEntry{}
		g.aliases[a.Name] = e
	}
	e.Alias, e.inFile = a, e.inFile || inFile
	g.moveFollowers(e)
	g.changes.note()
}

// removeAlias forgets one. Clients that are attached stay where they are.
func (g *registry) removeAlias(name string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.aliases[name] == nil {
		return fmt.Errorf("%w: there is no alias %q", status.ErrUnknownModel, name)
	}
	delete(g.aliases, name)
	g.changes.note()
	return nil
}

// checkAliases says why a configuration's aliases cannot be, with its models.
func (g *registry) checkAliases(list []alias.Alias, models []ModelConfig) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(list) > maxAliases {
		return fmt.Errorf("%w: %d aliases, at most %d", status.ErrQuota, len(list), maxAliases)
	}
	named, willBe := map[string]bool{}, map[string]bool{}
	for _, a := range list {
		if named[a.Name] {
			return fmt.Errorf("%w: alias %q is declared twice", status.ErrInvalid, a.Name)
		}
		named[a.Name] = true
	}
	for _, m := range models {
		willBe[m.Name] = true
		if e := g.aliases[m.Name]; e != nil && !e.inFile {
			return fmt.Errorf("%w: model %q: there is an alias of that name", status.ErrInvalid, m.Name)
		}
	}
	isAlias := func(name string) bool { return named[name] || g.aliases[name] != nil && !g.aliases[name].inFile }
	for i := range list {
		if err := g.checkAlias(&list[i], isAlias, willBe); err != nil {
			return err
		}
	}
	return nil
}

// putAliases makes the aliases of the configuration these. Those that were made
// by a command stay.
func (g *registry) putAliases(list []alias.Alias) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for name, e := range g.aliases {
		if e.inFile && !slices.ContainsFunc(list, func(a alias.Alias) bool { return a.Name == name }) {
			delete(g.aliases, name)
			g.changes.note()
		}
	}
	for _, a := range list {
		g.putAlias(a, true)
	}
}

// listAliases is every alias by name, with how many clients each model has
// through it.
func (g *registry) listAliases() (list []control.Alias) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(g.aliases)) {
		e := g.aliases[name]
		line := control.Alias{Name: name}
		for _, t := range e.To {
			line.To = append(line.To, control.AliasTarget{Model: t.Model, Share: int(t.Share), Clients: e.count(t.Model)})
		}
		list = append(list, line)
	}
	return list
}

// changeAlias is OpAlias.
func (b *Broker) changeAlias(req *control.Request) error {
	if req.Save && b.cfg.SaveAlias == nil {
		return errNotSaved
	}
	a := alias.Alias{Name: req.Model}
	for _, t := range req.Targets {
		a.To = append(a.To, alias.Target{Model: t.Model, Share: alias.Share(t.Share)})
	}
	b.reloading.Lock() // a reload has the same names in hand
	defer b.reloading.Unlock()
	err := b.models.removeAlias
	if len(a.To) > 0 {
		err = func(string) error { return b.models.setAlias(a) }
	}
	if err := err(a.Name); err != nil {
		return err
	}
	b.log.Info("alias changed", "alias", a.Name, "to", a.String())
	if !req.Save {
		return nil
	}
	if err := b.cfg.SaveAlias(a); err != nil {
		return fmt.Errorf("changed, but not saved: %w", err)
	}
	return nil
}
