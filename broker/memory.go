package broker

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/ringbatch/ringbatch/shm"
)

// checkMemory refuses a ring that this machine could never back: asking is
// cheap, running into it with clients attached is not.
func checkMemory(bytes int64) error {
	total := memTotal()
	if total > 0 && bytes > total {
		return fmt.Errorf("%w: the ring would take %d MiB, this machine has %d MiB", shm.ErrNoMemory, bytes>>20, total>>20)
	}
	return nil
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
