package status

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
)

func TestDocumentationListsEveryStatus(t *testing.T) {
	doc, err := os.ReadFile("../docs/errors.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range All() {
		if line := fmt.Sprintf("| %d | %s | %s |", uint8(s), s.Name(), s.Error()); !strings.Contains(string(doc), line+"\n") {
			t.Errorf("docs/errors.md lacks the line\n%s", line)
		}
	}
}

func TestEveryStatusHasANameAndAText(t *testing.T) {
	seen := map[string]bool{}
	for _, s := range All() {
		if s.Name() == "" || s.Error() == "" || seen[s.Name()] || !s.Valid() {
			t.Errorf("status %d: name %q, text %q", s, s.Name(), s.Error())
		}
		seen[s.Name()] = true
	}
	if s := Code(200); s.Valid() || s.Name() == "" || s.Error() == "" {
		t.Error("an unknown status has no text")
	}
	if !errors.Is(error(ErrFull), ErrFull) || !ErrFull.Retryable() || ErrShape.Retryable() {
		t.Error("a status does not compare as an error")
	}
}
