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
// on the ring gets a window of the model with the largest share, and is asked to
// attach again when that is another model:
//
//	attach ──► chosen, reply sent ──► settled ── asked ──► moving ──► gone
//
// A client attaches again before it leaves its old session, so no request is lost.

const maxAliases = 256

// aliasEntry is one alias and its clients. The registry's lock guards it.
type aliasEntry struct {
	alias.Alias
	inFile    bool // the configuration names it
	followers []*follower
}

// follower is a client's session that began with an alias.
type follower struct {
	entry     *aliasEntry
	model     string
	signature string // it stays with models of this signature, while there is one
	conn      *net.UnixConn
	follows   bool // it understands AttachAgain; the broker hangs up on others
	settled   bool // it has its reply
	moving    bool // it is to attach again
}

// askToMove has the client attach again. The caller holds the registry's lock.
func (f *follower) askToMove() {
	if f.moving = true; f.settled {
		f.sendAttachAgain()
	}
}

// sendAttachAgain never waits: if the socket's buffer is full, it hangs up.
func (f *follower) sendAttachAgain() {
	_ = withFD(f.conn, func(fd int) error {
		if f.follows && unix.Sendto(fd, []byte{control.AttachAgain}, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, nil) == nil {
			return nil
		}
		return unix.Shutdown(fd, unix.SHUT_RDWR)
	})
}

// takeForClient takes a model for a client, by the model's name or an alias, until
// leaveModel. With an alias it returns a follower, to settle or unfollow. A client that
// was attached before gives its signature.
func (g *registry) takeForClient(name, signature string, follows bool, conn *net.UnixConn) (m *model, f *follower, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	entry := g.aliases[name]
	if entry == nil {
		if m = g.awaitModel(name); m == nil {
			return nil, nil, g.unknownModel(name)
		}
		if signature != "" && signature != m.signature {
			return nil, nil, fmt.Errorf("%w: %q is %s, the client was attached to %s",
				status.ErrSignatureMismatch, name, m.signature, signature)
		}
		g.joinModel(m)
		return m, nil, nil
	}
	for _, t := range entry.To {
		g.awaitModel(t.Model)
	}
	if entry = g.aliases[name]; entry == nil { // removed while we waited
		return nil, nil, g.unknownModel(name)
	}
	t := g.chooseTarget(entry, signature)
	if t == nil {
		return nil, nil, g.misfitError(entry, signature)
	}
	m = g.models[t.Model]
	g.joinModel(m)
	f = &follower{entry: entry, model: t.Model, signature: m.signature, conn: conn, follows: follows}
	entry.followers = append(entry.followers, f)
	return m, f, nil
}

func (g *registry) isAlias(name string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.aliases[name] != nil
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
		if now := m.isStaffed() || m.onDemand.Load(); best == nil || now && !staffed || now == staffed && t.Share > best.Share {
			best, staffed = t, now
		}
	}
	return best
}

// misfitError says why no model of an alias fits a client.
func (g *registry) misfitError(e *aliasEntry, signature string) error {
	var there []string
	for _, t := range e.To {
		if m := g.models[t.Model]; m != nil && m.made == nil {
			there = append(there, fmt.Sprintf("%q, which is %s", t.Model, m.signature))
		}
	}
	if len(there) == 0 {
		return fmt.Errorf("%w: %q is an alias of %s, and none of these models exists yet", status.ErrUnknownModel, e.Name, &e.Alias)
	}
	return fmt.Errorf("%w: %q is an alias of %s; the client was attached to %s",
		status.ErrSignatureMismatch, e.Name, strings.Join(there, " and "), signature)
}

// countClients returns how many clients have the model by the alias.
func (e *aliasEntry) countClients(model string) (n int) {
	for _, f := range e.followers {
		if f.model == model && !f.moving {
			n++
		}
	}
	return n
}

// settleFollower is called when a follower has its reply, and can be asked to move.
func (g *registry) settleFollower(f *follower) {
	if f == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if f.settled = true; f.moving {
		f.sendAttachAgain()
	}
}

// unfollow ends a follower that takeForClient returned.
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

// moveFollowers asks clients to move that have another model than chooseTarget's.
// The caller holds the lock.
func (g *registry) moveFollowers(e *aliasEntry) {
	if g.aliases[e.Name] != e || g.draining || g.chooseTarget(e, "") == nil {
		return // nothing to move to
	}
	for _, f := range e.followers {
		if t := g.chooseTarget(e, f.signature); !f.moving && (t == nil || t.Model != f.model) {
			f.askToMove()
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

// checkAlias refuses an alias that clashes with other names. willBe are models that are
// about to be declared. The caller holds the lock.
func (g *registry) checkAlias(a *alias.Alias, isAlias func(string) bool, willBe map[string]bool) error {
	if err := a.Check(); err != nil {
		return err
	}
	if g.models[a.Name] != nil || willBe[a.Name] {
		return fmt.Errorf("%w: alias %q: there is a model of that name; give the model another one, like %s@1",
			status.ErrInvalid, a.Name, a.Name)
	}
	for _, t := range a.To {
		if isAlias(t.Model) {
			return fmt.Errorf("%w: alias %q: %q is an alias itself; name the models that it stands for",
				status.ErrInvalid, a.Name, t.Model)
		}
	}
	return nil
}

// setAlias routes a name to other models. Attached clients are asked to move.
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
			return g.unknownModel(t.Model) // most often a typo
		}
	}
	if g.aliases[a.Name] == nil && len(g.aliases) >= maxAliases {
		return fmt.Errorf("%w: there are %d aliases, and no more may be; remove one", status.ErrQuota, len(g.aliases))
	}
	g.putAlias(a, false)
	return nil
}

// putAlias makes or changes a checked alias. The caller holds the lock.
func (g *registry) putAlias(a alias.Alias, inFile bool) {
	e := g.aliases[a.Name]
	if e == nil {
		e = &aliasEntry{}
		g.aliases[a.Name] = e
	}
	e.Alias, e.inFile = a, e.inFile || inFile
	g.moveFollowers(e)
	g.changes.noteChange()
}

// removeAlias removes an alias. Attached clients stay where they are.
func (g *registry) removeAlias(name string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.aliases[name] == nil {
		return fmt.Errorf("%w: there is no alias %q", status.ErrUnknownModel, name)
	}
	delete(g.aliases, name)
	g.changes.noteChange()
	return nil
}

// checkAliases refuses aliases of a configuration that clash with other names.
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

// putAliases replaces the configuration's aliases. Aliases made by a command stay.
func (g *registry) putAliases(list []alias.Alias) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for name, e := range g.aliases {
		if e.inFile && !slices.ContainsFunc(list, func(a alias.Alias) bool { return a.Name == name }) {
			delete(g.aliases, name)
			g.changes.noteChange()
		}
	}
	for _, a := range list {
		g.putAlias(a, true)
	}
}

func (g *registry) listAliases() (list []control.Alias) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(g.aliases)) {
		e := g.aliases[name]
		line := control.Alias{Name: name}
		for _, t := range e.To {
			line.To = append(line.To, control.AliasTarget{Model: t.Model, Share: int(t.Share), Clients: e.countClients(t.Model)})
		}
		list = append(list, line)
	}
	return list
}

// changeAlias answers OpAlias.
func (b *Broker) changeAlias(req *control.Request) (err error) {
	if req.Save && b.cfg.SaveAlias == nil {
		return errNotSaved
	}
	a := alias.Alias{Name: req.Model}
	for _, t := range req.Targets {
		a.To = append(a.To, alias.Target{Model: t.Model, Share: alias.Share(t.Share)})
	}
	b.reloading.Lock() // a reload changes the same names
	defer b.reloading.Unlock()
	if len(a.To) == 0 {
		err = b.models.removeAlias(a.Name)
	} else {
		err = b.models.setAlias(a)
	}
	if err != nil {
		return err
	}
	b.log.Info("alias changed", "alias", a.Name, "to", a.String())
	if !req.Save {
		return nil
	}
	return notSaved(b.cfg.SaveAlias(a))
}
