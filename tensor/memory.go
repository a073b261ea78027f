// SPDX-License-Identifier: Apache-2.0

package tensor

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/ringbatch/ringbatch/status"
)

// ParseMemory reads where a tensor lies: "host" or nothing is "", "device" is
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

// OnDevice says that the tensor lies in device memory: no Go slice over it.
func (t Spec) OnDevice() bool { return t.Memory != "" }

// Device is the number of the GPU that it lies on, as the worker that allocates
// counts them; -1 on the host.
func (t Spec) Device() int {
	number, ok := strings.CutPrefix(t.Memory, "device:")
	n, err := strconv.Atoi(number)
	if !ok || err != nil {
		return -1
	}
	return n
}

// FirstOnDevice is the first tensor that lies in device memory; nil if none does.
func FirstOnDevice(tensors []Spec) *Spec {
	if i := slices.IndexFunc(tensors, Spec.OnDevice); i >= 0 {
		return &tensors[i]
	}
	return nil
}

// FirstOnDevice is the same for both sides.
func (s *Signature) FirstOnDevice() *Spec {
	if t := FirstOnDevice(s.Inputs); t != nil {
		return t
	}
	return FirstOnDevice(s.Outputs)
}

// CheckOneDevice refuses tensors of one ring on several GPUs: its device memory
// is one allocation.
func CheckOneDevice(tensors []Spec) error {
	first := FirstOnDevice(tensors)
	for i := range tensors {
		if t := &tensors[i]; first != nil && t.OnDevice() && t.Memory != first.Memory {
			return fmt.Errorf("%w: %s lies on another GPU than %s; all device tensors of a ring lie on one", status.ErrInvalid, t, first)
		}
	}
	return nil
}

// PlaceTexts is the texts of tensors with those that say nothing about memory in
// the given one. What is only a name stays that.
func PlaceTexts(texts []string, memory string) []string {
	if memory == "" {
		return texts
	}
	placed := slices.Clone(texts)
	for i, text := range placed {
		if strings.HasSuffix(text, "]") {
			placed[i] = text + "@" + memory
		}
	}
	return placed
}
