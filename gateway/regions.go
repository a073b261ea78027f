// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"errors"
	"fmt"
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

// regions are the pieces of POSIX shared memory that callers on this host have
// registered for their tensors. They are read and written by pread and pwrite,
// one copy each way: a mapping of a file that its owner shortens would be a
// SIGBUS here.
type regions struct {
	on     bool
	folder string // where shm_open keeps its files

	mu     sync.Mutex
	byName map[string]*region
}

// region is one of them. Its file is closed when it is neither registered nor
// in use: a request that is under way keeps what its caller unregisters.
type region struct {
	name, key    string
	offset, size int64
	owner        owner
	file         *os.File
	device, node uint64 // what the file is, by whatever name

	users int // under regions.mu: the registration, and each call
}

// regionUse is where in a region a tensor lies.
type regionUse struct {
	name         string
	offset, size int64
	region       *region
}

func newRegions(on bool) *regions {
	return &regions{on: on, folder: "/dev/shm", byName: map[string]*region{}}
}

var errRegionsOff = refuse(http.StatusForbidden, codes.PermissionDenied, "system shared memory is off; start the gateway with --system_shared_memory")

// allowed tells whether this caller may use regions at all.
func (r *regions) allowed(who *caller) error {
	switch {
	case !r.on:
		return errRegionsOff
	case !who.isLocal():
		return refuse(http.StatusForbidden, codes.PermissionDenied, "system shared memory is for callers on this host")
	}
	return nil
}

// ownerFor is whose regions the caller may see and use.
func (r *regions) ownerFor(who *caller) (owner, error) {
	if err := r.allowed(who); err != nil {
		return owner{}, err
	}
	uid, err := who.uid()
	if err != nil {
		return owner{}, err
	}
	return who.owner(uid), nil
}

// register opens a region. The file has to belong to the user who asks: what
// this process may read is not theirs for the asking.
func (r *regions) register(who *caller, name, key string, offset, size uint64) error {
	if err := r.allowed(who); err != nil {
		return err
	}
	base := strings.TrimPrefix(key, "/")
	switch {
	case name == "" || len(name) > maxRegionName:
		return badRequest("a region's name has 1..%d bytes", maxRegionName)
	case base == "" || base == "." || base == ".." || strings.ContainsAny(base, "/\x00") || len(base) > 255:
		return badRequest("key %q is no name of POSIX shared memory", key)
	case size == 0 || offset > 1<<62 || size > 1<<62:
		return badRequest("region %q: offset %d and %d bytes are out of range", name, offset, size)
	}
	uid, err := who.uid()
	if err != nil {
		return refuse(http.StatusForbidden, codes.PermissionDenied, "region %q: which user asks is unknown: %v", name, err)
	}
	file, err := os.OpenFile(filepath.Join(r.folder, base), os.O_RDWR|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return badRequest("region %q: open shared memory %q: %v", name, key, errors.Unwrap(err))
	}
	k := &region{name: name, key: key, offset: int64(offset), size: int64(size), owner: who.owner(uid), file: file, users: 1}
	if err := k.checkFile(uid); err != nil {
		file.Close()
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.byName[name] != nil:
		err = refuse(http.StatusConflict, codes.AlreadyExists, "region %q is registered already", name)
	case len(r.byName) >= maxRegions:
		err = refuse(http.StatusTooManyRequests, codes.ResourceExhausted, "%d regions are registered, no more are taken", maxRegions)
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
		return badRequest("region %q: %v", k.name, err)
	}
	stat := info.Sys().(*syscall.Stat_t)
	switch {
	case !info.Mode().IsRegular():
		return badRequest("region %q: %q is no shared memory", k.name, k.key)
	case stat.Uid != uid:
		return refuse(http.StatusForbidden, codes.PermissionDenied, "region %q: shared memory %q belongs to another user", k.name, k.key)
	case k.offset > info.Size() || k.size > info.Size()-k.offset:
		return badRequest("region %q: %d bytes at offset %d are out of range, shared memory %q has %d", k.name, k.size, k.offset, k.key, info.Size())
	}
	k.device, k.node = uint64(stat.Dev), stat.Ino
	return nil
}

// unregister forgets one region of the caller's, or with "" all of them.
func (r *regions) unregister(who *caller, name string) error {
	if !r.on && name == "" {
		return nil // tools do this before they begin
	}
	owner, err := r.ownerFor(who)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if name != "" {
		if k := r.byName[name]; k == nil || k.owner != owner {
			return nil // Triton does not mind either
		}
	}
	for n, k := range r.byName {
		if k.owner == owner && (name == "" || name == n) {
			delete(r.byName, n)
			r.drop(k)
		}
	}
	return nil
}

// status lists the caller's regions.
func (r *regions) status(who *caller, name string) ([]*region, error) {
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
	slices.SortFunc(list, func(x, y *region) int { return strings.Compare(x.name, y.name) })
	return list, nil
}

func unknownRegion(name string) error {
	return badRequest("no shared-memory region %q is registered", name)
}

// use finds the region of a tensor and checks that the tensor lies inside.
func (r *regions) use(who *caller, u *regionUse) error {
	owner, err := r.ownerFor(who)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	k := r.byName[u.name]
	if k == nil || k.owner != owner {
		return unknownRegion(u.name)
	}
	if u.offset < 0 || u.size < 0 || u.offset > k.size || u.size > k.size-u.offset {
		return badRequest("%d bytes at offset %d are out of range, shared-memory region %q has %d", u.size, u.offset, u.name, k.size)
	}
	k.users++
	u.region = k
	return nil
}

func (r *regions) leave(u *regionUse) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.drop(u.region)
	u.region = nil
}

// drop gives up one use. The caller holds mu.
func (r *regions) drop(k *region) {
	if k.users--; k.users == 0 {
		k.file.Close()
	}
}

// closeAll forgets everything.
func (r *regions) closeAll() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for n, k := range r.byName {
		delete(r.byName, n)
		r.drop(k)
	}
}

// regionSource reads an input out of a region, into the slot.
type regionSource struct {
	region *region
	at     int64 // in the file
}

func (s *regionSource) ReadFull(p []byte) error {
	for len(p) > 0 {
		n, err := unix.Pread(int(s.region.file.Fd()), p, s.at)
		if err == unix.EINTR {
			continue
		}
		if err == nil && n == 0 {
			err = errors.New("its owner has shortened it")
		}
		if err != nil {
			return badRequest("reading shared-memory region %q: %v", s.region.name, err)
		}
		p, s.at = p[n:], s.at+int64(n)
	}
	return nil
}

// write puts an output into its region.
func (o *output) write() error {
	if int64(o.size) > o.region.size {
		return fmt.Errorf("%w: output %q takes %d bytes, its place in shared memory has %d", status.ErrOutputTooSmall, o.name, o.size, o.region.size)
	}
	at := o.region.region.offset + o.region.offset
	// A write past the end would make the file longer again, by memory of ours.
	var file unix.Stat_t
	if err := unix.Fstat(int(o.region.region.file.Fd()), &file); err == nil && at+int64(o.size) > file.Size {
		return badRequest("writing shared-memory region %q: its owner has shortened it", o.region.name)
	}
	for _, p := range o.parts {
		for len(p) > 0 {
			n, err := unix.Pwrite(int(o.region.region.file.Fd()), p, at)
			if err == unix.EINTR {
				continue
			}
			if err != nil {
				return badRequest("writing shared-memory region %q: %v", o.region.name, err)
			}
			p, at = p[n:], at+int64(n)
		}
	}
	return nil
}

// checkRegions finds the call's regions. Outputs must not lie where another
// tensor of the same call lies.
func (c *call) checkRegions() error {
	g := c.model.g
	for i := range c.inputs {
		in := &c.inputs[i]
		if in.region.name == "" {
			continue
		}
		if err := g.regions.use(c.caller, &in.region); err != nil {
			return fmt.Errorf("input %q: %w", in.name, err)
		}
		in.src = &regionSource{in.region.region, in.region.region.offset + in.region.offset}
	}
	for i := range c.outputs {
		o := &c.outputs[i]
		if o.region.name == "" {
			continue
		}
		if err := g.regions.use(c.caller, &o.region); err != nil {
			return fmt.Errorf("output %q: %w", o.name, err)
		}
		for j := range c.inputs {
			if o.region.overlaps(&c.inputs[j].region) {
				return badRequest("output %q overlaps input %q in shared memory", o.name, c.inputs[j].name)
			}
		}
		for j := range i {
			if o.region.overlaps(&c.outputs[j].region) {
				return badRequest("output %q overlaps output %q in shared memory", o.name, c.outputs[j].name)
			}
		}
	}
	return nil
}

func (u *regionUse) overlaps(v *regionUse) bool {
	if u.region == nil || v.region == nil || u.region.device != v.region.device || u.region.node != v.region.node {
		return false
	}
	a, b := u.region.offset+u.offset, v.region.offset+v.offset
	return a < b+v.size && b < a+u.size
}

func (c *call) releaseRegions() {
	for i := range c.inputs {
		if u := &c.inputs[i].region; u.region != nil {
			c.model.g.regions.leave(u)
		}
	}
	for i := range c.outputs {
		if u := &c.outputs[i].region; u.region != nil {
			c.model.g.regions.leave(u)
		}
	}
}

// message is the region as both protocols tell of it.
func (k *region) message() *oip.SystemSharedMemoryStatusResponse_RegionStatus {
	return &oip.SystemSharedMemoryStatusResponse_RegionStatus{Name: k.name, Key: k.key, Offset: uint64(k.offset), ByteSize: uint64(k.size)}
}
