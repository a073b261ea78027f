// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/ringbatch/ringbatch/internal/typo"
	"github.com/ringbatch/ringbatch/tensor"
)

// The table. A row is a Key, the notation of its value, and its field of Settings. Each
// variable is a function that makes a typed setting for New.
var (
	MaxBatchSize = row(Key{Name: "max_batch_size", Default: "32", Live: true,
		Help: "maximum rows of a batch; while the model runs it cannot exceed its value at the start"},
		number(1, MaxRows), func(at *place) *int { return &at.s.MaxBatchSize })
	MaxBatchCost = row(Key{Name: "max_batch_cost", Default: "0", Live: true,
		Help: "maximum cost of a batch, the sum of its rows: what the client says, or else the size of the dimension that cost " +
			"names; a request above the maximum runs alone; 0: none"},
		number(0, MaxCost), func(at *place) *int { return &at.s.MaxBatchCost })
	_ = add(&Key{Name: "cost", Kind: "dimension", Help: "the variable dimension whose size a row costs: its name, like edges, " +
		"or INPUT.DIMENSION; if left out, the first", read: readCost, write: writeCost})
	WaitTime = row(Key{Name: "wait_time", Default: "auto", Live: true,
		Help: "how long the oldest request waits for others to batch with; 0: not at all; auto: as long as it pays (docs/batching.md)"},
		durationOrAuto(), func(at *place) *time.Duration { return &at.s.WaitTime })
	LatencyGoal = row(Key{Name: "latency_goal", Default: "0s", Live: true,
		Help: "with wait_time auto: fill batches while p99 stays within this, and refuse requests that would take longer " +
			"(Overloaded); 0: none"},
		duration(0), func(at *place) *time.Duration { return &at.s.LatencyGoal })
	PreferredBatchSizes = row(Key{Name: "preferred_batch_sizes", Live: true,
		Help: "rows at which a batch goes out without waiting for more, ascending"},
		numbers[int](1, MaxRows, MaxPreferred), func(at *place) *[]int { return &at.s.PreferredBatchSizes })
	Slots = row(Key{Name: "slots", DefaultNote: "4096, within 1 GiB and half of what a memory cgroup leaves", Help: "rows the ring holds"},
		number(1, math.MaxInt32), func(at *place) *int { return &at.s.Slots })
	MaxWindow = row(Key{Name: "max_window", Default: "0", Live: true,
		Help: "maximum slots per client, up to 65536 and never less than max_batch_size; 0: 7/8 of the ring, all of one " +
			"with 16 slots or fewer"},
		number(0, math.MaxInt32), func(at *place) *int { return &at.s.MaxWindow })
	Private = row(Key{Name: "private", Default: "false", Live: true,
		Help: "clear a client's slots when it leaves, before another client gets them; takes about 0.3 ms per MiB of the " +
			"window, outside of requests"},
		boolean(), func(at *place) *bool { return &at.s.Private })
	Lease = row(Key{Name: "lease", Default: "30s", Live: true,
		Help: "how long a batch may run before its worker counts as hung and is killed; 100ms at least"},
		duration(MinLease), func(at *place) *time.Duration { return &at.s.Lease })
	MaxAttempts = row(Key{Name: "max_attempts", Default: "3", Live: true,
		Help: "how often a request is tried before it fails, if its workers die"},
		number(1, 100), func(at *place) *int { return &at.s.MaxAttempts })
	NoWorker = row(Key{Name: "no_worker", Default: "wait", Live: true,
		Help: "a request that comes while no worker is attached: wait for one until its deadline, or refuse it at once (NoWorker)"},
		oneOf(WaitForWorker, RefuseWithoutWorker), func(at *place) *NoWorkerAction { return &at.s.NoWorker })
	Ragged = row(Key{Name: "ragged", Default: "false",
		Help: "batch requests of different sizes together, unpadded; the worker must opt in; not with buckets or padding"},
		boolean(), func(at *place) *bool { return &at.s.Ragged })
	PreserveOrder = row(Key{Name: "preserve_order", Default: "false", Live: true, Help: "keep each client's requests in order"},
		boolean(), func(at *place) *bool { return &at.s.PreserveOrder })
	DefaultPriority = row(Key{Name: "default_priority", Default: "0", Live: true, Help: "the level of requests that name none"},
		number(0, MaxLevels-1), func(at *place) *int { return &at.s.DefaultPriority })
	Ageing = row(Key{Name: "ageing", Default: "0s", Live: true,
		Help: "a waiting request rises by one level after each such time; 0: never"},
		duration(0), func(at *place) *time.Duration { return &at.s.Ageing })
	MaxQueue = row(Key{Name: "max_queue", Default: "0", Live: true, PerLevel: true,
		Help: "requests that may wait; further ones end with QueueFull; 0: no limit"},
		number(0, math.MaxInt32), func(at *place) *int { return &at.s.Levels[at.level].MaxQueue })
	DefaultTimeout = row(Key{Name: "default_timeout", Default: "0s", Live: true, PerLevel: true,
		Help: "how long a request may wait before on_timeout applies; 0: no limit"},
		duration(0), func(at *place) *time.Duration { return &at.s.Levels[at.level].DefaultTimeout })
	MaxTimeout = row(Key{Name: "max_timeout", Default: "0s", Live: true, PerLevel: true,
		Help: "limit for a request's own deadline; 0: none"},
		duration(0), func(at *place) *time.Duration { return &at.s.Levels[at.level].MaxTimeout })
	OnTimeout = row(Key{Name: "on_timeout", Default: "reject", Live: true, PerLevel: true,
		Help: "a request that waited too long: reject ends it, delay moves it behind all others"},
		oneOf(Reject, Delay), func(at *place) *Action { return &at.s.Levels[at.level].OnTimeout })

	prioritiesKey = add(&Key{Name: "priorities", Kind: "number", Default: "1", Live: true,
		Help:  "number of priority levels, 0 the most urgent; if left out, as many as other keys name",
		read:  func(*place, string) error { return nil }, // makeLevels has read it
		write: func(at *place, put func(sub, text string)) { put("", strconv.Itoa(at.s.LevelCount())) }})
	_ = add(&Key{Name: "buckets", Sub: "INPUT.DIMENSION", Whole: "auto", Kind: "list",
		Help: "sizes that a variable dimension of an input is rounded up to, ascending, the last one its maximum; buckets.atoms: of " +
			"the dimensions of that name; " +
			"`buckets=auto`: powers of two from 16, for all of them",
		read: readBuckets, write: writeBuckets})
)

// Cost is the variable dimension whose size a row costs: its name, or INPUT.DIMENSION.
func Cost(dimension string) Setting { return Setting{"cost", dimension} }

// Priorities is the number of priority levels.
func Priorities(n int) Setting { return Setting{prioritiesKey.Name, strconv.Itoa(n)} }

// Buckets are the sizes of an input's variable dimension after rounding up.
func Buckets(input string, dimension int, sizes ...uint32) Setting {
	return Setting{fmt.Sprintf("buckets.%s.%d", input, dimension), joined(sizes)}
}

// AutoBuckets are powers of two from 16 up to the largest size, for every
// variable dimension of the inputs that no other setting names.
func AutoBuckets() Setting { return Setting{"buckets", "auto"} }

// Key is a row of the table.
type Key struct {
	Name        string
	Kind        string // of value: number, duration, list, bool, or its words
	Default     string // as text; "" for none
	DefaultNote string // in words, where the default depends on something
	Live        bool   // it may change while the model runs
	PerLevel    bool   // name.N sets it for priority level N alone
	Sub         string // must follow the name after a dot, if not empty
	Whole       string // the only value of a name without Sub
	Help        string

	read  func(at *place, text string) error
	write func(at *place, put func(sub, text string))
}

// place is the place of a value in Settings.
type place struct {
	s      *Settings
	level  int    // for keys that are PerLevel
	sub    string // for keys that have a Sub
	inputs []tensor.Spec
}

var table []*Key // filled by the rows above

func add(k *Key) *Key {
	table = append(table, k)
	return k
}

// row adds a row, and returns the function that makes a setting of it.
func row[T any](k Key, kind kind[T], field func(at *place) *T) func(T) Setting {
	k.Kind = kind.name
	k.read = func(at *place, text string) (err error) {
		v, err := kind.parse(text)
		if err == nil {
			*field(at) = v
		}
		return err
	}
	k.write = func(at *place, put func(sub, text string)) { put("", kind.format(*field(at))) }
	add(&k)
	return func(v T) Setting { return Setting{k.Name, kind.format(v)} }
}

// Keys are the rows of the table.
func Keys() []Key {
	list := make([]Key, len(table))
	for i, k := range table {
		list[i] = *k
	}
	return list
}

// Names lists the keys that accept chooses.
func Names(accept func(Key) bool) (names []string) {
	for _, k := range table {
		if accept(*k) {
			names = append(names, k.Name)
		}
	}
	return names
}

// unknown is the error for a key that the table does not have.
func unknown(name string) error {
	return typo.UnknownKey(name, Names(func(Key) bool { return true }))
}
