// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// stranger is a user that nobody knows.
const stranger = 54321

// access connects as another user. It needs root to become one.
func access(r *run) {
	r.must(os.Chmod(r.bed.Dir, 0o711))
	for i, c := range []struct {
		about  string
		folder os.FileMode
		open   bool
		uids   []int
		start  bool
		attach bool
	}{
		{"private folder: a stranger cannot even reach the socket", 0o700, false, nil, true, false},
		{"private folder, stranger on the list: the folder still decides", 0o700, false, []int{stranger}, true, false},
		{"open folder, stranger not on the list", 0o755, true, nil, true, false},
		{"open folder, stranger on the list", 0o755, true, []int{stranger}, true, true},
		{"world-readable folder that nobody asked for: the broker refuses", 0o755, false, nil, false, false},
	} {
		dir := r.bed.Path(fmt.Sprint(i))
		r.must(errors.Join(os.Mkdir(dir, c.folder), os.Chmod(dir, c.folder)))
		job := r.brokerJob()
		job.Socket, job.OpenFolder, job.AllowedUIDs = filepath.Join(dir, "broker.sock"), c.open, c.uids
		b := r.start(testbed.Spec{Role: "broker", Job: job})
		err := b.Expect("ready", nil, enoughTime)
		r.check((err == nil) == c.start, "%s: the broker: %v", c.about, err)
		if err == nil {
			err := r.ping(job.Socket, stranger)
			named := err == nil || strings.Contains(err.Error(), status.ErrForbidden.Error())
			r.check((err == nil) == c.attach && named, "%s: a stranger: %v", c.about, err)
			err = r.ping(job.Socket, 0)
			r.check(err == nil, "%s: the broker's own user: %v", c.about, err)
		}
		r.bed.End(b)
		fmt.Printf("   %s\n", c.about)
		r.progress(i + 1)
	}
}

// ping attaches as a user.
func (r *run) ping(socket string, uid int) error {
	p := r.start(testbed.Spec{Role: "ping", Job: socket, UID: uid})
	defer r.bed.End(p)
	return p.Expect("attached", nil, enoughTime)
}
