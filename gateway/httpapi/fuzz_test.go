// SPDX-License-Identifier: Apache-2.0

package httpapi

import (
	"bytes"
	"encoding/json"
	"strconv"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/test/gatecall"
)

var requestSeeds = []string{
	`{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2]},{"name":"v","shape":[1,3],"datatype":"INT16","data":[[1,2,3]]}]}`,
	`{"id":"a\"\u00e4","parameters":{"priority":1,"timeout":5,"binary_data_output":true,"z":[{}]},"inputs":[{"name":"x","shape":[2,2],` +
		`"datatype":"FP32","data":[NaN,1e-3,-0,Infinity]},{"name":"v","shape":[2,0],"datatype":"INT16","data":[]}],` +
		`"outputs":[{"name":"y","parameters":{"binary_data":true}}]}`,
	`{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","parameters":{"shared_memory_region":"r","shared_memory_byte_size":8,` +
		`"shared_memory_offset":1}}]}`,
	`{"inputs":[`, `{"a":[[[[]]]]}`, `{}`, ``, `[]`, `{"inputs":null}`, "{\"\\ud800\":1}",
}

func FuzzJSONRequest(f *testing.F) {
	for _, s := range requestSeeds {
		f.Add([]byte(s))
	}
	k := gatecall.Lone(f)
	f.Fuzz(func(t *testing.T, text []byte) {
		c := core.NewCall(k, nil, &core.Caller{Peer: &core.Peer{}, Use: &core.Usage{}})
		defer c.Done()
		_, err := (httpCall{c}).readJSON(text, nil)
		gatecall.Named(t, err)
		if err != nil {
			return
		}
		plain := bytes.ReplaceAll(bytes.ReplaceAll(text, []byte("Infinity"), []byte("0")), []byte("NaN"), []byte("0"))
		if !json.Valid(plain) {
			t.Errorf("%q was taken for JSON", text)
		}
		if err = c.Check(); err == nil {
			_, err = gatecall.ReadAll(c)
		}
		gatecall.Named(t, err)
	})
}

func FuzzBinaryBody(f *testing.F) {
	head := `{"inputs":[{"name":"v","shape":[1,3],"datatype":"INT16","parameters":{"binary_data_size":6}},{"name":"x","shape":[1,2],` +
		`"datatype":"FP32","parameters":{"binary_data_size":8}}]}`
	f.Add(strconv.Itoa(len(head)), []byte(head+"12345678901234"), true)
	f.Add(strconv.Itoa(len(head)), []byte(head+"1234567890123"), false)
	f.Add("0", []byte("12345678"), true)
	f.Add("-1", []byte("{}"), true)
	f.Add("99999999999999999999", []byte("{}"), false)
	for _, s := range requestSeeds {
		f.Add(strconv.Itoa(len(s)), []byte(s), true)
		f.Add("", []byte(s), false)
	}
	k := gatecall.Lone(f)
	f.Fuzz(func(t *testing.T, header string, text []byte, known bool) {
		length := int64(-1)
		if known {
			length = int64(len(text))
		}
		b := &body{}
		c := core.NewCall(k, nil, &core.Caller{Peer: &core.Peer{}, Use: &core.Usage{}})
		defer c.Done()
		err := b.open(k.G, bytes.NewReader(text), length, "")
		if err == nil {
			defer b.close()
			err = b.read(httpCall{c}, header)
		}
		if err == nil {
			err = c.Check()
		}
		var got [][]byte
		if err == nil {
			got, err = gatecall.ReadAll(c)
		}
		gatecall.Named(t, err)
		if err == nil && header != "" { // the tensors are the end of the body
			if all := bytes.Join(got, nil); !bytes.HasSuffix(text, all) && !strings.Contains(string(text), `"data"`) {
				t.Errorf("%q: %q", text, all)
			}
		}
	})
}
