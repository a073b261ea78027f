// SPDX-License-Identifier: Apache-2.0

package core_test

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	rpcstatus "google.golang.org/grpc/status"

	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/must"
)

// shared makes a file of shared memory, of this user.
func (r *rig) shared(name string, content []byte) (key string) {
	r.t.Helper()
	key = fmt.Sprintf("/rb-test-%d-%s", os.Getpid(), name)
	path := filepath.Join("/dev/shm", key)
	must.Do(r.t, os.WriteFile(path, content, 0o600))
	r.t.Cleanup(func() { os.Remove(path) })
	return key
}

func (r *rig) register(name, key string, offset, size int) *httpAnswer {
	r.t.Helper()
	return r.post("/v2/systemsharedmemory/region/"+name+"/register", nil,
		fmt.Appendf(nil, `{"key":%q,"offset":%d,"byte_size":%d}`, key, offset, size))
}

// inShared makes a request with its tensors in regions.
func inShared(in, out string) string {
	place := func(text string) string { // region,offset,size
		var region string
		var offset, size int
		_, _ = fmt.Sscanf(strings.ReplaceAll(text, ",", " "), "%s %d %d", &region, &offset, &size)
		return fmt.Sprintf(`{"shared_memory_region":%q,"shared_memory_offset":%d,"shared_memory_byte_size":%d}`, region, offset, size)
	}
	return fmt.Sprintf(`{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","parameters":%s}],"outputs":[{"name":"y",`+
		`"parameters":%s}]}`, place(in), place(out))
}

func sharing(c *core.Config) { c.SystemSharedMemory = true }

func TestTensorsLieInTheCallersSharedMemory(t *testing.T) {
	r := doublingRig(t, sharing)
	content := append(make([]byte, 8), floats(1, 2, 3, 4)...)
	content = append(content, make([]byte, 40)...)
	key := r.shared("both", content)
	r.register("a", key, 8, 16).is(t, "", 200)
	r.register("b", key, 24, 40).is(t, "", 200)
	a := r.infer("double", inShared("a,0,16", "b,8,16"))
	if a.status != 200 || len(a.raw) != 0 || a.Outputs[0].Parameters != nil || a.Outputs[0].Data != nil {
		t.Errorf("%+v", a)
	}
	got, err := os.ReadFile(filepath.Join("/dev/shm", key))
	must.Do(t, err)
	content = append(append(append(append(make([]byte, 8), floats(1, 2, 3, 4)...), make([]byte, 8)...), floats(2, 4, 6, 8)...),
		make([]byte, 16)...)
	if !bytes.Equal(got, content) {
		t.Errorf("%x, not %x", got, content)
	}
	for _, c := range []struct{ name, in, out, reason string }{
		{"an input beyond its region", "a,4,16", "b,0,16", "out of range"},
		{"a negative offset", "a,-4,16", "b,0,16", "out of range"},
		{"an offset at the end of numbers", "a,9223372036854775807,16", "b,0,16", "out of range"},
		{"an output beyond its region", "a,0,16", "b,32,16", "out of range"},
		{"an output that does not fit", "a,0,16", "b,0,12", "takes 16 bytes"},
		{"a size that is not the shape's", "a,0,12", "b,0,16", "takes 16 bytes"},
		{"an unknown region", "z,0,16", "b,0,16", `"z"`},
		{"an output over its input", "a,0,16", "a,0,16", "overlaps"},
	} {
		r.infer("double", inShared(c.in, c.out)).is(t, c.name, 400, c.reason)
	}
	// The same memory by another name overlaps too.
	r.register("again", key, 0, 64).is(t, "", 200)
	r.infer("double", inShared("a,0,16", "again,20,16")).is(t, "by another name", 400, "overlaps")
	must.Do(t, os.Truncate(filepath.Join("/dev/shm", key), 24))
	r.infer("double", inShared("a,0,16", "b,0,16")).is(t, "a file whose output was cut off", 400, "shortened")
	must.Do(t, os.Truncate(filepath.Join("/dev/shm", key), 8))
	r.infer("double", inShared("a,0,16", "b,0,16")).is(t, "a file that was shortened", 400, "shortened")
	r.idle()
}

func TestOnlySharedMemoryOfTheCallersIsRegistered(t *testing.T) {
	r := newRig(t, sharing)
	key := r.shared("one", make([]byte, 64))
	link := filepath.Join("/dev/shm", key+"-link")
	must.Do(t, os.Symlink("/etc/passwd", link))
	defer os.Remove(link)
	for _, c := range []struct {
		name, key    string
		offset, size int
	}{
		{"a path", "/../../etc/passwd", 0, 1}, {"a link", key + "-link", 0, 1}, {"nothing", "", 0, 1}, {"no such thing",
			"/rb-there-is-none", 0, 1},
		{"too long", key, 0, 65}, {"too far", key, 64, 1}, {"empty", key, 0, 0}, {"dots", "..", 0, 1},
		{"past the end of numbers", key, 1 << 62, 1 << 62},
	} {
		r.register("r", c.key, c.offset, c.size).is(t, c.name, 400)
	}
	if os.Getuid() == 0 { // a file of somebody else
		must.Do(t, os.Chown(filepath.Join("/dev/shm", key), 12345, -1))
		r.register("r", key, 0, 64).is(t, "of another user", 403, "another user")
		_ = os.Chown(filepath.Join("/dev/shm", key), 0, -1)
	}
	r.register("r", key, 0, 64).is(t, "", 200)
	r.register("r", key, 0, 64).is(t, "twice", 409)
	off := newRig(t, nil)
	off.register("r", key, 0, 64).is(t, "switched off", 403)
	off.post("/v2/systemsharedmemory/unregister", nil, nil).is(t, "tools unregister everything before they begin", 200)
}

func TestARegionThatIsUnregisteredStaysUntilItsRequestsHaveEnded(t *testing.T) {
	m := doubler(t)
	r := newRig(t, sharing, m)
	h, release := r.holds(m)
	key := r.shared("used", append(floats(1, 2, 3, 4), make([]byte, 16)...))
	r.register("u", key, 0, 32)
	done := make(chan *httpAnswer)
	go func() { done <- r.infer("double", inShared("u,0,16", "u,16,16")) }()
	<-h.began
	r.post("/v2/systemsharedmemory/region/u/unregister", nil, nil).is(t, "", 200)
	r.infer("double", inShared("u,0,16", "u,16,16")).is(t, "a new request", 400)
	release()
	(<-done).is(t, "the request under way", 200)
	got, _ := os.ReadFile(filepath.Join("/dev/shm", key))
	if !bytes.Equal(got[16:], floats(2, 4, 6, 8)) {
		t.Errorf("%x", got)
	}
	r.idle()
}

func TestCallersWithDifferentTokensHaveRegionsOfTheirOwn(t *testing.T) {
	tokens := filepath.Join(t.TempDir(), "tokens")
	must.Do(t, os.WriteFile(tokens, []byte("one one-0123456789abcdef\ntwo two-0123456789abcdef\n"), 0o600))
	r := newRig(t, func(c *core.Config) { sharing(c); c.TokenFile = tokens })
	key := r.shared("mine", make([]byte, 64))
	as := func(who, path, body string) *httpAnswer {
		return r.post(path, map[string]string{"Authorization": "Bearer " + who + "-0123456789abcdef"}, []byte(body))
	}
	if a := as("one", "/v2/systemsharedmemory/region/r/register", fmt.Sprintf(`{"key":%q,"byte_size":64}`, key)); a.status != 200 {
		t.Fatalf("%d %q", a.status, a.Error)
	}
	as("two", "/v2/systemsharedmemory/unregister", "")
	as("two", "/v2/systemsharedmemory/region/r/unregister", "")
	status := func(who string) int {
		req, err := http.NewRequestWithContext(soon(t), http.MethodGet, r.http+"/v2/systemsharedmemory/region/r/status", nil)
		must.Do(t, err)
		req.Header.Set("Authorization", "Bearer "+who+"-0123456789abcdef")
		return r.do(req).status
	}
	if one, two := status("one"), status("two"); one != 200 || two != 400 {
		t.Errorf("one sees %d, two sees %d", one, two)
	}
}

func TestRegionsOverGRPC(t *testing.T) {
	r := doublingRig(t, sharing)
	key := r.shared("rpc", append(floats(1, 2, 3, 4), make([]byte, 16)...))
	c := r.client()
	if _, err := c.SystemSharedMemoryRegister(soon(t), &oip.SystemSharedMemoryRegisterRequest{Name: "g", Key: key,
		ByteSize: 32}); err != nil {
		t.Fatal(err)
	}
	at := func(offset int64) map[string]*oip.InferParameter {
		return map[string]*oip.InferParameter{
			"shared_memory_region":    {ParameterChoice: &oip.InferParameter_StringParam{StringParam: "g"}},
			"shared_memory_offset":    {ParameterChoice: &oip.InferParameter_Int64Param{Int64Param: offset}},
			"shared_memory_byte_size": {ParameterChoice: &oip.InferParameter_Int64Param{Int64Param: 16}},
		}
	}
	in := rpcInput("x", "FP32", 1, 4)
	in.Parameters = at(0)
	rep, err := c.ModelInfer(soon(t), &oip.ModelInferRequest{ModelName: "double", Inputs: []*oip.ModelInferRequest_InferInputTensor{in},
		Outputs: []*oip.ModelInferRequest_InferRequestedOutputTensor{{Name: "y", Parameters: at(16)}}})
	must.Do(t, err)
	if len(rep.RawOutputContents) != 1 || len(rep.RawOutputContents[0]) != 0 { // load tools count the entries
		t.Errorf("%v", rep)
	}
	got, _ := os.ReadFile(filepath.Join("/dev/shm", key))
	if !bytes.Equal(got[16:], floats(2, 4, 6, 8)) {
		t.Errorf("%x", got)
	}
	known, err := c.SystemSharedMemoryStatus(soon(t), &oip.SystemSharedMemoryStatusRequest{})
	if err != nil || known.Regions["g"].GetByteSize() != 32 {
		t.Errorf("%v %v", known, err)
	}
	if _, err := c.CudaSharedMemoryRegister(soon(t),
		&oip.CudaSharedMemoryRegisterRequest{Name: "g"}); rpcstatus.Code(err) != codes.Unimplemented ||
		!strings.Contains(err.Error(), "connect to the broker itself") {
		t.Error(err)
	}
	r.idle()
}
