// SPDX-License-Identifier: Apache-2.0

package configfile

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/admin/alias"
	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
)

func TestAliasesAreReadAndWhatIsSavedWinsOverThem(t *testing.T) {
	cfg, err := Parse("[alias]\none = \"m@1\"\ntwo = { \"m@1\" = 99.5, \"m@2\" = 0.5 }\n[alias.three]\n\"m@1\" = 50\nm = 50\n" + plainModel)
	must.Do(t, err)
	texts := func(list []alias.Alias) string {
		var all []string
		for _, a := range list {
			all = append(all, a.Name+": "+a.String())
		}
		return strings.Join(all, ", ")
	}
	if got := texts(cfg.Aliases); got != "one: m@1, three: m=50 m@1=50, two: m@1=99.5 m@2=0.5" {
		t.Error(got)
	}
	saved := NewSaved(filepath.Join(t.TempDir(), "c.toml"), "")
	two, err := alias.Parse("two", "m@2")
	must.Do(t, errors.Join(err, saved.SaveAlias(two), saved.SaveAlias(alias.Alias{Name: "one"}), saved.SaveAlias(two), saved.Apply(&cfg)))
	if got := texts(cfg.Aliases); got != "three: m=50 m@1=50, two: m@2" {
		t.Error(got)
	}
	var other broker.Config
	if err := saved.Apply(&other); err != nil || texts(other.Aliases) != "two: m@2" {
		t.Error(texts(other.Aliases), err)
	}
	for text, says := range map[string]string{
		"m = 1": "neither a model", "m = []": "neither a model", "m = {}": "1..8 models", "m = \"\"": "no model's name",
		"m = \"m\"": "itself", "m = { a = 50, b = 49 }": "99 %", "m = { a = \"all\" }": "number of percent",
		"m = { a = 0, b = 100 }": "above 0", "m = { a.b = 100 }": "take quotes", "m = { a = nan }": "above 0",
	} {
		if _, err := Parse("[alias]\n" + text); !errors.Is(err, status.ErrInvalid) || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

func TestASavedPolicyHasNoNumberOfInstances(t *testing.T) {
	saved := NewSaved(filepath.Join(t.TempDir(), "c.toml"), "")
	must.Do(t, saved.Save("m", policy.Policy{"wait_time": "1ms"}, 0))
	text, err := os.ReadFile(saved.path)
	if must.Do(t, err); !strings.Contains(string(text), "wait_time") || strings.Contains(string(text), "instances") {
		t.Error(string(text))
	}
}
