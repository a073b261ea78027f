// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"os/exec"
	"strings"
	"testing"
	"time"
)

const chunkedDouble = "POST /v2/models/double/infer HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n"

func doubleRig(t *testing.T) *rig {
	m := doubler(t)
	r := newRig(t, nil, m)
	r.worker(m, double)
	return r
}

// answers are what a connection says until it ends.
func (r *rig) answers(request string) string {
	r.t.Helper()
	c := r.connect()
	if _, err := io.WriteString(c, request); err != nil {
		r.t.Fatal(err)
	}
	all, err := io.ReadAll(c)
	if err != nil {
		r.t.Fatal(err)
	}
	return string(all)
}

const askLast = "GET /v2/health/live HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"

func TestAConnectionGoesOnAfterAChunkedRequest(t *testing.T) {
	r := doubleRig(t)
	json := `{"inputs":[` + goodInput + `]}`
	head := `{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","parameters":{"binary_data_size":16}}]}`
	inChunks := func(headers, body string) string {
		half := len(body) / 2
		return fmt.Sprintf("%s%s\r\n%x\r\n%s\r\n%x;an=extension\r\n%s\r\n0\r\n\r\n", chunkedDouble, headers, half, body[:half], len(body)-half, body[half:])
	}
	binary := inChunks(fmt.Sprintf("%s: %d\r\n", headerLength, len(head)), head+string(floats(1, 2, 3, 4)))
	wrong := inChunks("", `{"inputs":[]}`)
	unknown := strings.Replace(inChunks("", json), "/double/", "/none/", 1)
	for name, k := range map[string]struct {
		request string
		status  string
		next    string
	}{
		"JSON":                            {inChunks("", json), "200 OK", plainDouble()},
		"tensors":                         {binary, "200 OK", plainDouble()},
		"an error in it":                  {wrong, "400 Bad Request", plainDouble()},
		"an error before it is read":      {unknown, "404 Not Found", plainDouble()},
		"net/http's":                      {inChunks("Content-Encoding: identity\r\n", json), "200 OK", askLive},
		"net/http's tensors":              {strings.Replace(binary, "Host", "Content-Encoding: identity\r\nHost", 1), "200 OK", askLive},
		"net/http's error before its end": {strings.Replace(inChunks("Content-Encoding: x\r\n", json), "/double/", "/none/", 1), "404 Not Found", askLive},
	} {
		got := r.answers(k.request + k.request + k.next + askLast) // pipelined
		if strings.Count(got, "HTTP/1.1 "+k.status) < 2 || strings.Count(got, "HTTP/1.1 ") != 4 || strings.Count(got, "Connection: close") != 1 {
			t.Errorf("%s: %q", name, got)
		}
	}
	r.idle()
}

func TestAChunkedRequestThatMayHideAnotherIsTheLastOfItsConnection(t *testing.T) {
	r := doubleRig(t)
	whole := "1\r\n{\r\n1\r\n}\r\n0\r\n\r\n"
	for name, request := range map[string]string{
		"a length too":                 chunkedDouble + "Content-Length: 4\r\n\r\n" + whole,
		"a length before":              strings.Replace(chunkedDouble, "Host", "cOnTENT-lENGTH: 4\r\nHost", 1) + "\r\n" + whole,
		"a length too, to net/http":    chunkedDouble + "Content-Encoding: identity\r\nContent-Length: 4\r\n\r\n" + whole,
		"a length too, not inference":  "GET /v2 HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n" + whole,
		"trailers":                     chunkedDouble + "\r\n2\r\n{}\r\n0\r\nA: b\r\n\r\n",
		"another encoding":             strings.Replace(chunkedDouble, "chunked", "gzip, chunked", 1) + "\r\n" + whole,
		"the encoding twice":           chunkedDouble + "Transfer-Encoding: chunked\r\n\r\n" + whole,
		"a letter that folds to k":     strings.Replace(chunkedDouble, "chunked", "chun\u212aed", 1) + "\r\n" + whole,
		"a length that is none":        chunkedDouble + "\r\n2x\r\n{}\r\n0\r\n\r\n",
		"a length that is too large":   chunkedDouble + "\r\nfffffffffffffffff\r\n{}\r\n0\r\n\r\n",
		"a chunk longer than it says":  chunkedDouble + "\r\n1\r\n{}\r\n0\r\n\r\n",
		"a line that does not end":     chunkedDouble + "\r\n2;" + strings.Repeat("x", 2*headBytes) + "\r\n{}\r\n0\r\n\r\n",
		"a version that has no chunks": strings.Replace(chunkedDouble, "HTTP/1.1", "HTTP/1.0", 1) + "\r\n" + whole,
	} {
		if got := r.answers(request + askLive); strings.Count(got, "HTTP/1.1 ")+strings.Count(got, "HTTP/1.0 ") != 1 {
			t.Errorf("%s: %q", name, got)
		}
	}
	r.idle()
}

// What is left of a body that nobody wants is waited for no longer than one that
// somebody does.
func TestChunksThatNeverEndAreNotWaitedForAfterAnError(t *testing.T) {
	m := doubler(t)
	r := newRig(t, func(c *Config) {
		c.pace = pace{body: time.Hour, answer: 24 * time.Hour, idle: 24 * time.Hour, sweep: time.Hour, rate: leastRate}
	}, m)
	for name, headers := range map[string]string{"a session's": "", "net/http's": "Content-Encoding: identity\r\n"} {
		c := r.connect()
		r.g.models.asking.Lock() // the broker does not answer
		if _, err := io.WriteString(c, strings.Replace(chunkedDouble, "/double/", "/none/", 1)+headers+"\r\n2\r\n{}\r\n"); err != nil {
			t.Fatal(err)
		}
		r.underWay(1) // its head has been read
		r.g.models.asking.Unlock()
		heard := make(chan string, 1)
		go func() {
			all, err := io.ReadAll(c)
			heard <- fmt.Sprintf("%s, %v", all, err)
		}()
		r.eventually("it is answered", func() error {
			select {
			case got := <-heard:
				if !strings.HasPrefix(got, "HTTP/1.1 404 ") || !strings.HasSuffix(got, ", <nil>") {
					t.Errorf("%s: %s", name, got)
				}
				return nil
			default:
				r.passes(2 * time.Hour)
				return errors.New("it is not")
			}
		})
		r.knows(0, 0, func(*conn) bool { return true })
	}
}

func TestChunksOfGoKeepTheirConnection(t *testing.T) {
	r := doubleRig(t)
	json := []byte(`{"inputs":[` + goodInput + `]}`)
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	_, _ = z.Write(json)
	z.Close()
	for encoding, body := range map[string][]byte{"": json, "gzip": zipped.Bytes()} {
		client := &http.Client{Transport: &http.Transport{}}
		for i := range 3 {
			reused := false
			ctx := httptrace.WithClientTrace(soon(t), &httptrace.ClientTrace{GotConn: func(c httptrace.GotConnInfo) { reused = c.Reused }})
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.http+"/v2/models/double/infer", io.MultiReader(bytes.NewReader(body)))
			if err != nil {
				t.Fatal(err)
			}
			if encoding != "" {
				req.Header.Set("Content-Encoding", encoding)
			}
			rep, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			text, err := io.ReadAll(rep.Body)
			rep.Body.Close()
			if err != nil || rep.StatusCode != 200 || reused != (i > 0) {
				t.Errorf("%q, request %d: %s %s, %v, reused %t", encoding, i, rep.Status, text, err, reused)
			}
		}
		client.CloseIdleConnections()
	}
}

func TestChunksOfCurlKeepTheirConnection(t *testing.T) {
	curl, err := exec.LookPath("curl")
	if err != nil {
		t.Skip(err)
	}
	r := doubleRig(t)
	url := r.http + "/v2/models/double/infer"
	for _, expect := range []string{"Expect:", "Expect: 100-continue"} {
		out, err := exec.Command(curl, "--silent", "--show-error", "--noproxy", "*", "--max-time", "60", "--write-out", "%{http_code} %{num_connects}\n", "--output", "/dev/null", "--output", "/dev/null", "--output", "/dev/null",
			"--header", "Transfer-Encoding: chunked", "--header", expect, "--data", `{"inputs":[`+goodInput+`]}`, url, url, url).CombinedOutput()
		if want := "200 1\n200 0\n200 0\n"; err != nil || string(out) != want {
			t.Errorf("%s: %s, %v", expect, out, err)
		}
	}
}

func TestChunksOfPythonKeepTheirConnection(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip(err)
	}
	r := doubleRig(t)
	const script = `
import http.client, sys
c = http.client.HTTPConnection(sys.argv[1], timeout=60)
c.connect()
first = c.sock
for _ in range(3):
    c.request("POST", "/v2/models/double/infer", iter([sys.argv[2][:5].encode(), sys.argv[2][5:].encode()]))
    answer = c.getresponse()
    answer.read()
    assert answer.status == 200, answer.status
    assert c.sock is first, "another connection"
`
	if out, err := exec.Command(python, "-c", script, strings.TrimPrefix(r.http, "http://"), `{"inputs":[`+goodInput+`]}`).CombinedOutput(); err != nil {
		t.Errorf("%s, %v", out, err)
	}
}

func TestAContentLengthIsFoundInAnyPieces(t *testing.T) {
	for text, want := range map[string]bool{
		"Host: h\r\nContent-Length: 5\r\n": true, "\n\nCONTENT-\ncontent-LENGTH": true,
		"\ncontent-lengt": false, "\nContent Length": false, "\nInference-Header-Content-Length": false,
	} {
		for step := 1; step <= len(text); step++ {
			var s lengthSearch
			found := false
			for at := 0; at < len(text) && !found; at += step {
				found = s.finds([]byte(text[at:min(at+step, len(text))]))
			}
			if found != want {
				t.Errorf("%q in pieces of %d: %t", text, step, found)
			}
		}
	}
}
