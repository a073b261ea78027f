// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
	"unicode"

	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/tensor"
)

var update = flag.Bool("update", false, "write cbindings/src/layout_gen.h anew")

const cLayout = "../cbindings/src/layout_gen.h"

// TestTheCLibraryHasThisLayout keeps the C library's offsets those of this
// package: the header is generated here, and C does not compile where its
// structs differ from it.
func TestTheCLibraryHasThisLayout(t *testing.T) {
	want := cHeader()
	if *update {
		must.Do(t, os.WriteFile(cLayout, want, 0o644))
	}
	got, err := os.ReadFile(cLayout)
	must.Do(t, err)
	if !bytes.Equal(got, want) {
		t.Errorf("%s is not what the layout says; go test ./shm -run CLibrary -update", cLayout)
	}
}

func cHeader() []byte {
	var b bytes.Buffer
	b.WriteString("/* SPDX-License-Identifier: Apache-2.0 */\n/* Generated from Go's package shm: go test ./shm -run CLibrary -update " +
		"*/\n#ifndef RB_LAYOUT_GEN_H\n#define RB_LAYOUT_GEN_H\n")
	for _, c := range []struct {
		name  string
		value uint64
	}{
		{"LAYOUT_VERSION", LayoutVersion}, {"MAGIC", magic}, {"KIND_PLANES", uint64(KindPlanes)},
		{"HELD_BIT", uint64(heldBit)}, {"KIND_COMMIT", uint64(KindCommit)}, {"KIND_CANCEL", uint64(KindCancel)}, {"KIND_STREAM", uint64(KindStream)},
		{"REASON_BYTES", reasonBytes}, {"MAX_SLOTS", MaxSlots}, {"MAX_BATCH_ROWS", MaxBatchRows}, {"MAX_MAIL_DEPTH", MaxMailDepth},
		{"PAGE", pageSize}, {"CACHE_LINE", cacheLine}, {"SEGMENT_HEADER", segmentHeader}, {"DEVICE_GRAIN", deviceGrain}, {"MAX_DEVICES",
			tensor.MaxDevices}, {"RING_WORDS", ringWordsAt}, {"MAIL_WORDS", mailWordsAt}, {"RECORD_WORDS", recordWordsAt},
		{"MAX_VARIABLE_DIMS", tensor.MaxVariableDims}, {"MAX_RANK", tensor.MaxRank}, {"MAX_TENSORS",
			tensor.MaxTensors}, {"MAX_NAME_BYTES", tensor.MaxNameBytes},
		{"KIND_WEIGHTS", uint64(kindWeights)}, {"WEIGHT_BUFFERS", weightBuffers}, {"WEIGHT_FOLLOWERS", WeightFollowers},
		{"MAX_WEIGHT_TENSORS", maxWeightTensors}, {"MAX_WEIGHT_BYTES", maxWeightBytes}, {"WEIGHT_WORDS", weightWordsAt},
		{"WEIGHT_FOLLOWER_WORDS", followersAt}, {"WEIGHT_REASON", weightReasonAt}, {"WEIGHT_REASON_BYTES", weightReasonBytes},
		{"WEIGHT_DATA", weightDataAt},
		{"SEALS", seals}, {"CONTROL_VERSION", control.Version}, {"MAX_FRAME", control.MaxFrame},
	} {
		fmt.Fprintf(&b, "#define RB_GO_%s %#xull\n", c.name, c.value)
	}
	b.WriteString("\n/* For each struct SIZE(type, bytes) and for each of its fields PLACE(type, field, offset). */\n#define " +
		"RB_GO_STRUCTS(SIZE, PLACE)")
	for _, s := range []struct {
		name  string
		value any
	}{
		{"header", header{}}, {"commit_entry", Commit{}}, {"mail", Mail{}}, {"mail_request", MailRequest{}}, {"done_entry",
			Done{}}, {"record", Record{}},
		{"ring_words", ringWords{}}, {"mail_words", mailWords{}}, {"record_words", recordWords{}}, {"times", Times{}}, {"bell", Bell{}},
		{"weight_words", weightWords{}}, {"follower_words", followerWords{}},
	} {
		typ := reflect.TypeOf(s.value)
		line := fmt.Sprintf("\tSIZE(rb_%s, %d)", s.name, typ.Size())
		for i := range typ.NumField() {
			f := typ.Field(i)
			if f.Name == "_" {
				continue
			}
			place := fmt.Sprintf("PLACE(rb_%s, %s, %d)", s.name, snake(f.Name), f.Offset)
			if len(line)+len(place) > 120 {
				fmt.Fprintf(&b, " \\\n%s", line)
				line = "\t" + place
			} else {
				line += " " + place
			}
		}
		fmt.Fprintf(&b, " \\\n%s", line)
	}
	b.WriteString("\n\n#endif\n")
	return b.Bytes()
}

// snake is a Go name as C writes fields.
func snake(name string) string {
	var b strings.Builder
	for i, r := range name {
		if i > 0 && unicode.IsUpper(r) {
			b.WriteByte('_')
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}
