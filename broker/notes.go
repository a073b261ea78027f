package broker

import (
	"fmt"
	"reflect"
	"time"

	"github.com/ringbatch/ringbatch/internal/control"
)

// differences are the parts of a policy that a worker asked for and that the
// model, which others declared, has otherwise. What the worker left open is no
// difference.
func differences(asked, has *control.Policy) (notes []string) {
	compare := func(key string, want, is any) {
		if v := reflect.ValueOf(want); !v.IsZero() && !reflect.DeepEqual(want, is) {
			notes = append(notes, fmt.Sprintf("%s is %v, this worker asked for %v", key, is, want))
		}
	}
	compare("max_batch_size", asked.MaxBatchSize, has.MaxBatchSize)
	if asked.WaitTime != 0 {
		if want := max(0, asked.WaitTime); want != has.WaitTime {
			notes = append(notes, fmt.Sprintf("wait_time is %v, this worker asked for %v", time.Duration(has.WaitTime), time.Duration(want)))
		}
	}
	compare("slots", asked.Slots, has.Slots)
	compare("lease", time.Duration(asked.Lease), time.Duration(has.Lease))
	compare("max_attempts", asked.MaxAttempts, has.MaxAttempts)
	compare("preserve_order", asked.PreserveOrder, has.PreserveOrder)
	compare("ragged", asked.Ragged, has.Ragged)
	if len(asked.Preferred) > 0 {
		compare("preferred_batch_sizes", asked.Preferred, has.Preferred)
	}
	if len(asked.Buckets) > 0 {
		compare("buckets", asked.Buckets, has.Buckets)
	}
	return notes
}
