// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/ringbatch/ringbatch/internal/cgroup"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// checkMemory refuses a ring that this machine could never back, or that the
// broker's memory cgroup could not back now: asking is cheap, running into it
// with clients attached is not. The pages are charged to the process that touches them
// first, clients mostly; but where there is a limit they usually are in the
// same container.
func checkMemory(bytes int64) error {
	total := memTotal()
	if total > 0 && bytes > total {
		return fmt.Errorf("%w: the ring would take %d MiB, this machine has %d MiB", status.ErrNoMemory, bytes>>20, total>>20)
	}
	return shm.CheckRoom(bytes)
}

// checkRing refuses a ring that there is no memory for.
func (b *Broker) checkRing(name string, layout *shm.Layout) error {
	if err := checkMemory(layout.PlanesSize + layout.BoardSize); err != nil {
		return fmt.Errorf("model %q: %w; lower its slots (now %d of %d bytes)", name, err, layout.Slots, layout.SlotBytes())
	}
	return nil
}

// defaultRingBytes is how large a ring may be whose size was left to us: not
// more than half of what the memory cgroup, if there is one, has left.
func defaultRingBytes() int64 {
	if room, limited := cgroup.Tightest(); limited {
		return min(DefaultRingBytes, room.Left/2)
	}
	return DefaultRingBytes
}

// memTotal is this machine's memory, 0 if unknown.
func memTotal() int64 {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0
	}
	defer f.Close()
	for sc := bufio.NewScanner(f); sc.Scan(); {
		if rest, ok := strings.CutPrefix(sc.Text(), "MemTotal:"); ok {
			kb, _ := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 10, 64)
			return kb << 10
		}
	}
	return 0
}
