// SPDX-License-Identifier: Apache-2.0

package tensor

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/ringbatch/ringbatch/status"
)

// ParseMemory reads the memory of a tensor: "" and "host" become "", "device" becomes
// "device:0".
func ParseMemory(text string) (string, error) {
	if text == "" || text == "host" {
		return "", nil
	}
	number, ok := strings.CutPrefix(text, "device:")
	if text == "device" {
		number, ok = "0", true
	}
	n, err := strconv.ParseUint(number, 10, 8)
	if !ok || err != nil || n >= MaxDevices {
		return "", fmt.Errorf("%w: memory %q, must be host, device or device:N with N below %d", status.ErrInvalid, text, MaxDevices)
	}
	return "device:" + strconv.FormatUint(n, 10), nil
}

// OnDevice reports whether the tensor is in device memory, which Go cannot read.
func (t Spec) OnDevice() bool { return t.Memory != "" }

// Device is the number of the tensor's GPU, as the worker that allocates it counts GPUs,
// or -1 for host memory.
func (t Spec) Device() int {
	number, ok := strings.CutPrefix(t.Memory, "device:")
	n, err := strconv.Atoi(number)
	if !ok || err != nil {
		return -1
	}
	return n
}

// FirstOnDevice is the first tensor in device memory, or nil.
func FirstOnDevice(tensors []Spec) *Spec {
	if i := slices.IndexFunc(tensors, Spec.OnDevice); i >= 0 {
		return &tensors[i]
	}
	return nil
}

// FirstOnDevice is the first input, output or state in device memory, or nil.
func (s *Signature) FirstOnDevice() *Spec {
	return FirstOnDevice(slices.Concat(s.Inputs, s.Outputs, s.State))
}

// WithoutState is the signature as a client needs it: a client has no state in device memory.
func (s Signature) WithoutState() *Signature {
	s.State = nil
	return &s
}

// CheckOneDevice refuses tensors on several GPUs: the device memory of a ring is one
// allocation.
func CheckOneDevice(tensors []Spec) error {
	first := FirstOnDevice(tensors)
	for i := range tensors {
		if t := &tensors[i]; first != nil && t.OnDevice() && t.Memory != first.Memory {
			return fmt.Errorf("%w: %s lies on another GPU than %s; all device tensors of a ring lie on one",
				status.ErrInvalid, t, first)
		}
	}
	return nil
}

// PlaceTexts adds a memory to the texts of tensors that name none. A text that is only a
// name stays as it is, and so does a str, which is in host memory.
func PlaceTexts(texts []string, memory string) []string {
	if memory == "" {
		return texts
	}
	placed := slices.Clone(texts)
	for i, text := range placed {
		if strings.HasSuffix(text, "]") && !strings.Contains(text, ":str[") {
			placed[i] = text + "@" + memory
		}
	}
	return placed
}
