package admin

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/internal/control"
)

// policyTexts spells a policy with the keys of the configuration. Settings of
// priority levels carry the level's number: max_queue.1.
func policyTexts(p *control.Policy) map[string]string {
	duration := func(ns int64) string { return time.Duration(ns).String() }
	t := map[string]string{
		"max_batch_size":        strconv.Itoa(p.MaxBatchSize),
		"wait_time":             duration(p.WaitTime),
		"slots":                 strconv.Itoa(p.Slots),
		"lease":                 duration(p.Lease),
		"preferred_batch_sizes": list(p.Preferred),
		"default_level":         strconv.Itoa(p.DefaultLevel),
		"ageing":                duration(p.Ageing),
		"preserve_order":        strconv.FormatBool(p.PreserveOrder),
	}
	for i, l := range p.Levels {
		level := func(key string) string { return fmt.Sprintf("%s.%d", key, i) }
		t[level("max_queue")] = strconv.Itoa(l.MaxQueue)
		t[level("default_timeout")] = duration(l.DefaultTimeout)
		t[level("max_timeout")] = duration(l.MaxTimeout)
		t[level("on_timeout")] = "reject"
		if l.Delay {
			t[level("on_timeout")] = "delay"
		}
	}
	return t
}

func list(n []int) string {
	return strings.Join(strings.Fields(strings.Trim(fmt.Sprint(n), "[]")), ",")
}
