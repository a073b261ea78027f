// SPDX-License-Identifier: Apache-2.0

package core

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/status"
)

// regions are pieces of POSIX shared memory that callers on this host registered
// for their tensors. The gateway reads and writes them as files: if an owner
// shortens a mapped file, the gateway would get a SIGBUS.
type regions struct {
	on     bool
	folder string // of shm_open's files

	mu     sync.Mutex
	byName map[string]*region
}

// region is a registered file. It stays open until its registration and the last
// request that uses it have ended.
type region struct {
	Name, key    string
	offset, size int64
	owner        owner
	file         *os.File
	device, node uint64 // identify the file

	users int // the registration and each call; under regions.mu
}

// RegionUse is a tensor's place in a region.
type RegionUse struct {
	Name         string
	Offset, Size int64
	region       *region // nil: not found yet
	of           string  // for errors
}

func newRegions(on bool) *regions {
	return &regions{on: on, folder: "/dev/shm", byName: map[string]*region{}}
}

var errRegionsOff = Refuse(http.StatusForbidden, codes.PermissionDenied,
	"system shared memory is off; start the gateway with --system-shared-memory")

func (r *regions) allowed(who *Caller) error {
	switch {
	case !r.on:
		return errRegionsOff
	case !who.isLocal():
		return Refuse(http.StatusForbidden, codes.PermissionDenied, "system shared memory is for callers on this host")
	}
	return nil
}

// ownerFor returns the owner of the regions that the caller may use.
func (r *regions) ownerFor(who *Caller) (owner, error) {
	if err := r.allowed(who); err != nil {
		return owner{}, err
	}
	uid, err := who.uid()
	if err != nil {
		return owner{}, err
	}
	return who.owner(uid), nil
}

// Register opens a region. The file has to belong to the caller's user, whatever
// the gateway itself may read.
func (r *regions) Register(who *Caller, name, key string, offset, size uint64) error {
	if err := r.allowed(who); err != nil {
		return err
	}
	base := strings.TrimPrefix(key, "/")
	switch {
	case name == "" || len(name) > maxRegionName:
		return BadRequest("a region's name has 1..%d bytes", maxRegionName)
	case base == "" || base == "." || base == ".." || strings.ContainsAny(base, "/\x00") || len(base) > 255:
		return BadRequest("key %q is no name of POSIX shared memory", key)
	case size == 0 || offset > 1<<62 || size > 1<<62:
		return BadRequest("region %q: offset %d and %d bytes are out of range", name, offset, size)
	}
	uid, err := who.uid()
	if err != nil {
		return Refuse(http.StatusForbidden, codes.PermissionDenied, "region %q: which user asks is unknown: %v", name, err)
	}
	file, err := os.OpenFile(filepath.Join(r.folder, base), os.O_RDWR|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return BadRequest("region %q: open shared memory %q: %v", name, key, errors.Unwrap(err))
	}
	k := &region{Name: name, key: key, offset: int64(offset), size: int64(size), owner: who.owner(uid), file: file, users: 1}
	if err := k.checkFile(uid); err != nil {
		file.Close()
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.byName[name] != nil:
		err = Refuse(http.StatusConflict, codes.AlreadyExists, "region %q is registered already", name)
	case len(r.byName) >= maxRegions:
		err = Refuse(http.StatusTooManyRequests, codes.ResourceExhausted, "%d regions are registered, no more are taken", maxRegions)
	}
	if err != nil {
		file.Close()
		return err
	}
	r.byName[name] = k
	return nil
}

func (k *region) checkFile(uid uint32) error {
	info, err := k.file.Stat()
	if err != nil {
		return BadRequest("region %q: %v", k.Name, err)
	}
	stat := info.Sys().(*syscall.Stat_t)
	switch {
	case !info.Mode().IsRegular():
		return BadRequest("region %q: %q is no shared memory", k.Name, k.key)
	case stat.Uid != uid:
		return Refuse(http.StatusForbidden, codes.PermissionDenied, "region %q: shared memory %q belongs to another user", k.Name, k.key)
	case k.offset > info.Size() || k.size > info.Size()-k.offset:
		return BadRequest("region %q: %d bytes at offset %d are out of range, shared memory %q has %d", k.Name, k.size, k.offset, k.key,
			info.Size())
	}
	k.device, k.node = uint64(stat.Dev), stat.Ino
	return nil
}

// Unregister forgets a region of the caller, or with "" all of them.
func (r *regions) Unregister(who *Caller, name string) error {
	if !r.on && name == "" {
		return nil // load tools begin with this
	}
	owner, err := r.ownerFor(who)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for n, k := range r.byName { // an unknown name is no error in Triton either
		if k.owner == owner && (name == "" || name == n) {
			delete(r.byName, n)
			r.drop(k)
		}
	}
	return nil
}

// Status lists the caller's regions.
func (r *regions) Status(who *Caller, name string) ([]*region, error) {
	if !r.on && name == "" {
		return nil, nil
	}
	owner, err := r.ownerFor(who)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	var list []*region
	for n, k := range r.byName {
		if k.owner == owner && (name == "" || name == n) {
			list = append(list, k)
		}
	}
	if name != "" && len(list) == 0 {
		return nil, unknownRegion(name)
	}
	slices.SortFunc(list, func(x, y *region) int { return strings.Compare(x.Name, y.Name) })
	return list, nil
}

func unknownRegion(name string) error {
	return BadRequest("no shared-memory region %q is registered", name)
}

// use finds a tensor's region, checks the tensor's place, and counts the use.
func (r *regions) use(who *Caller, u *RegionUse) error {
	owner, err := r.ownerFor(who)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	k := r.byName[u.Name]
	if k == nil || k.owner != owner {
		return unknownRegion(u.Name)
	}
	if u.Offset < 0 || u.Size < 0 || u.Offset > k.size || u.Size > k.size-u.Offset {
		return BadRequest("%d bytes at offset %d are out of range, shared-memory region %q has %d", u.Size, u.Offset, u.Name, k.size)
	}
	k.users++
	u.region = k
	return nil
}

// drop gives up one use. The caller holds mu.
func (r *regions) drop(k *region) {
	if k.users--; k.users == 0 {
		k.file.Close()
	}
}

func (r *regions) closeAll() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for n, k := range r.byName {
		delete(r.byName, n)
		r.drop(k)
	}
}

type regionSource struct {
	region *region
	at     int64 // in the file
}

func (s *regionSource) ReadFull(p []byte) error {
	n, err := s.region.file.ReadAt(p, s.at)
	if errors.Is(err, io.EOF) {
		err = errors.New("its owner has shortened it")
	}
	if err != nil {
		return BadRequest("reading shared-memory region %q: %v", s.region.Name, err)
	}
	s.at += int64(n)
	return nil
}

// Place returns a tensor's place in shared memory, for a door to fill in.
func (c *Call) Place(u **RegionUse) *RegionUse {
	if *u == nil {
		*u = &RegionUse{}
		c.regions = append(c.regions, *u)
	}
	return *u
}

// useRegions finds the call's regions. An output must not overlap another tensor
// of the call.
func (c *Call) useRegions() error {
	for i := range c.Inputs {
		in := &c.Inputs[i]
		if in.Region == nil {
			continue
		}
		if err := c.useRegion(in.Region, "input", in.Name); err != nil {
			return err
		}
		in.Src = &regionSource{in.Region.region, in.Region.start()}
	}
	for i := range c.Outputs {
		o := &c.Outputs[i]
		if o.Region == nil {
			continue
		}
		if err := c.useRegion(o.Region, "output", o.Name); err != nil {
			return err
		}
		for _, other := range c.regions {
			if o.Region.overlaps(other) {
				return BadRequest("%s overlaps %s in shared memory", o.Region.of, other.of)
			}
		}
	}
	return nil
}

func (c *Call) useRegion(u *RegionUse, what, name string) error {
	u.of = fmt.Sprintf("%s %q", what, name)
	if err := c.Model.G.Regions.use(c.Caller, u); err != nil {
		return fmt.Errorf("%s: %w", u.of, err)
	}
	return nil
}

// writeRegions moves the outputs that the caller wants in shared memory there.
func (c *Call) writeRegions() error {
	for i := range c.Outputs {
		o := &c.Outputs[i]
		if o.Region == nil {
			continue
		}
		if int64(o.Size) > o.Region.Size {
			return fmt.Errorf("%w: output %q takes %d bytes, its place in shared memory has %d", status.ErrOutputTooSmall, o.Name, o.Size,
				o.Region.Size)
		}
		if err := o.Region.write(o.Parts, o.Size); err != nil {
			return err
		}
		clear(o.Parts)
		o.Parts, o.Size = o.Parts[:0], 0
	}
	return nil
}

func (u *RegionUse) write(parts [][]byte, size int) error {
	at, file := u.start(), u.region.file
	// A write past the end would make the file longer.
	if info, err := file.Stat(); err == nil && at+int64(size) > info.Size() {
		return BadRequest("writing shared-memory region %q: its owner has shortened it", u.Name)
	}
	for _, p := range parts {
		n, err := file.WriteAt(p, at)
		if err != nil {
			return BadRequest("writing shared-memory region %q: %v", u.Name, err)
		}
		at += int64(n)
	}
	return nil
}

// start is the place's offset in the file.
func (u *RegionUse) start() int64 { return u.region.offset + u.Offset }

func (u *RegionUse) overlaps(v *RegionUse) bool {
	if v == u || v.region == nil || u.region.device != v.region.device || u.region.node != v.region.node {
		return false
	}
	a, b := u.start(), v.start()
	return a < b+v.Size && b < a+u.Size
}

// leaveRegions ends the use of those regions that useRegions has found.
func (c *Call) leaveRegions() {
	r := c.Model.G.Regions
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, u := range c.regions {
		if u.region != nil {
			r.drop(u.region)
		}
	}
}

// Message describes the region for both protocols.
func (k *region) Message() *oip.SystemSharedMemoryStatusResponse_RegionStatus {
	return &oip.SystemSharedMemoryStatusResponse_RegionStatus{Name: k.Name, Key: k.key, Offset: uint64(k.offset), ByteSize: uint64(k.size)}
}
