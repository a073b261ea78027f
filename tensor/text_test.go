// SPDX-License-Identifier: Apache-2.0

package tensor

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
)

func TestTextsAreReadAsTheyWereWritten(t *testing.T) {
	spec, err := ParseSpec("x:str[2,<=8]")
	must.Do(t, err)
	texts := []string{"", "grüße", "12345678", "a\x00b"}
	made, err := spec.OfTexts(texts)
	must.Do(t, err)
	back, err := Texts(made)
	if err != nil || !slices.Equal(back, texts) || made.Rows() != 2 || spec.RowBytes() != 16 {
		t.Errorf("%q, %v, %v", back, err, made.Shape)
	}
	if longest, err := spec.CheckTexts(made.Data); longest != 8 || err != nil {
		t.Errorf("the longest has %d bytes, %v", longest, err)
	}
}

func TestATextThatDoesNotFitSaysWhy(t *testing.T) {
	spec, err := ParseSpec("x:str[<=8]")
	must.Do(t, err)
	for _, c := range []struct {
		texts []string
		want  error
		says  string
	}{
		{[]string{"a", "123456789"}, status.ErrSize, `"x", row 1: `},
		{[]string{"123456789"}, status.ErrSize, "9 bytes, at most 8"},
		{[]string{"\xff"}, status.ErrDType, "not UTF-8"},
		{nil, status.ErrSize, "rows of 1 texts, got 0"},
	} {
		if _, err := spec.OfTexts(c.texts); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%q: %v", c.texts, err)
		}
	}
	if _, err := (Spec{Name: "x", DType: U8, Shape: []int{8}}).OfTexts([]string{"a"}); !errors.Is(err, status.ErrDType) {
		t.Errorf("text for numbers: %v", err)
	}
	if _, err := Texts(Of("x", []byte("\xc3("), 1, 2)); !errors.Is(err, status.ErrDType) {
		t.Errorf("numbers as text: %v", err)
	}
}

func FuzzTexts(f *testing.F) {
	for _, text := range []string{"", "grüße", "\xff", "\xc3("} {
		f.Add(text, 8)
	}
	f.Fuzz(func(t *testing.T, text string, most int) {
		to := slices.Repeat([]byte{'?'}, most&63+1)
		if PutText(to, text) != nil {
			return
		}
		if back, err := Text(to); err != nil || string(back) != text {
			t.Fatalf("%q became %q, %v", text, back, err)
		}
	})
}
