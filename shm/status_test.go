package shm

import (
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
	for _, s := range Statuses() {
		if line := fmt.Sprintf("| %d | %s | %s |", uint8(s), s.Name(), s.Error()); !strings.Contains(string(doc), line+"\n") {
			t.Errorf("docs/errors.md lacks the line\n%s", line)
		}
	}
}
