package control

import (
	"errors"
	"runtime"
	"strings"
	"testing"
)

// Each of these made the decoder ask for memory by the gigabyte.
func TestAFewBytesCannotAskForMuchMemory(t *testing.T) {
	huge := "\xff\xff\xff\xff"
	for what, body := range map[string]string{
		"levels":    "\x81\xa6policy\x81\xa6levels\xdd" + huge,
		"buckets":   "\x81\xa6policy\x81\xa7buckets\xdd" + huge,
		"inputs":    "\x81\xa6worker\x81\xa6inputs\xdd" + huge,
		"set":       "\x81\xa3set\xdf" + huge,
		"model":     "\x81\xa5model\xdb" + huge,
		"stats":     "\x81\xa5stats\xc6" + huge,
		"models":    "\x81\xa6models\xdd" + huge,
		"depth":     "\x81\xa4what" + strings.Repeat("\x91", 1<<19) + "\xc0",
		"cut short": "\x82\xa5model",
		"no value":  "\xc1",
		"more":      "\x80\x80",
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for _, msg := range []any{&Request{}, &Reply{}} {
			if err := Decode([]byte(body), msg); !errors.Is(err, ErrFrame) {
				t.Errorf("%s: %v", what, err)
			}
		}
		runtime.ReadMemStats(&after)
		if got := after.TotalAlloc - before.TotalAlloc; got > 2<<20 {
			t.Errorf("%s: %d bytes of memory", what, got)
		}
	}
}
