// SPDX-License-Identifier: Apache-2.0

package core_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	rpcstatus "google.golang.org/grpc/status"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

func summer(t testing.TB, name string) broker.ModelConfig {
	m := modelConfig(t, name, []string{"x:f32[1]"}, []string{"y:f32[1]"})
	m.Signature.State = []tensor.Spec{{Name: "total", DType: tensor.F32, Shape: []int{1}}}
	return m
}

// sum adds each step's x to the sequence's total. It fails a negative x.
func sum(_ context.Context, b *worker.Batch) error {
	for i := range b.Rows() {
		x := worker.Row[float32](b.Input(0), i)[0]
		total := x + math.Float32frombits(binary.LittleEndian.Uint32(b.State(0).Bytes(i)))
		copy(b.NextState(0).Bytes(i), floats(total))
		copy(b.Output(0).Bytes(i), floats(total))
		if x < 0 {
			return errors.New("negative")
		}
	}
	return nil
}

func summingRig(t *testing.T, change func(*core.Config)) *rig {
	t.Helper()
	m := summer(t, "sum")
	r := newRig(t, change, m)
	r.worker(m, sum)
	return r
}

func stepBody(parameters string, x ...float32) string {
	return fmt.Sprintf(`{"parameters":{%s},"inputs":[{"name":"x","shape":[%d,1],"datatype":"FP32","data":%s}]}`, parameters, len(x),
		strings.ReplaceAll(fmt.Sprint(x), " ", ","))
}

// sumFrom is a step by hand.
func sumFrom(parameters string) string {
	body := stepBody(parameters, 1)
	return fmt.Sprintf("POST /v2/models/sum/infer HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
}

// sums fails the test if a step is not answered with that total.
func (r *rig) sums(parameters string, x float32, total float64) {
	r.t.Helper()
	if a := r.infer("sum", stepBody(parameters, x)); a.status != 200 || a.Outputs[0].Data[0] != total {
		r.t.Errorf("%s: %+v, not %v", parameters, a, total)
	}
}

// refused fails the test if a step has another status, or another text.
func (r *rig) refused(parameters string, status int, text string, x ...float32) {
	r.t.Helper()
	r.infer("sum", stepBody(parameters, x...)).is(r.t, parameters, status, text)
}

func stepMessage(id int, start, end bool) *oip.ModelInferRequest {
	flag := func(b bool) *oip.InferParameter {
		return &oip.InferParameter{ParameterChoice: &oip.InferParameter_BoolParam{BoolParam: b}}
	}
	return &oip.ModelInferRequest{ModelName: "sum", Inputs: []*oip.ModelInferRequest_InferInputTensor{rpcInput("x", "FP32", 1, 1)},
		RawInputContents: [][]byte{floats(1)},
		Parameters: map[string]*oip.InferParameter{"sequence_start": flag(start), "sequence_end": flag(end),
			"sequence_id": {ParameterChoice: &oip.InferParameter_Int64Param{Int64Param: int64(id)}}}}
}

func TestASequenceKeepsItsStateFromStepToStep(t *testing.T) {
	r := summingRig(t, nil)
	const start, end = `,"sequence_start":true`, `,"sequence_end":true`
	r.sums(`"sequence_id":7`+start, 1, 1)
	r.sums(`"sequence_id":"7"`+start, 100, 100) // another one
	r.sums(`"sequence_id":18446744073709551615`+start, 50, 50)
	r.sums(`"sequence_id":7`, 2, 3)
	r.sums(``, 40, 40)
	r.sums(`"sequence_id":0`, 40, 40)
	r.sums(`"sequence_id":""`, 40, 40)
	rep, err := r.client().ModelInfer(soon(t), stepMessage(7, false, false))
	must.Do(t, err)
	if got := rep.RawOutputContents[0]; string(got) != string(floats(4)) {
		t.Errorf("gRPC: %v", got)
	}
	r.refused(`"sequence_id":7`, 500, "negative", -1)
	r.sums(`"sequence_id":7`+end, 2, 6)
	r.refused(`"sequence_id":7`, 400, "model \"sum\" has no sequence 7: begin it with sequence_start", 1)
	r.sums(`"sequence_id":"7"`+start, 5, 5)
	r.sums(`"sequence_id":"7"`+end, 5, 10)
	r.sums(`"sequence_id":18446744073709551615`+end, 1, 51)
	r.sums(`"sequence_id":8`+start+end, 5, 5)

	r.refused(`"sequence_id":9`+start, 500, "negative", -1)
	r.refused(`"sequence_id":9`, 400, "no sequence 9", 1) // it has not begun
	r.refused(`"sequence_id":9`+start, 200, "", 1, 2)
	r.refused(`"sequence_id":9`, 400, "sequence 9 has 2, this step has 1", 1)
	r.refused(`"sequence_id":9`+start+end, 413, "", make([]float32, 9)...)
	for _, bad := range []string{`"sequence_id":-1`, `"sequence_id":1.5`, `"sequence_id":true`,
		`"sequence_id":"` + strings.Repeat("x", 129) + `"`, `"sequence_start":true`, `"sequence_id":1,"sequence_end":1`} {
		r.refused(bad, 400, "", 1)
	}
	r.idle()
}

func TestAModelWithoutStateIgnoresSequences(t *testing.T) {
	r := doublingRig(t, nil)
	r.infer("double", `{"parameters":{"sequence_id":7,"sequence_start":false},`+goodBody[1:]).is(t, "a step", 200)
}

func TestAModelWithStateDescribesItself(t *testing.T) {
	r := summingRig(t, func(c *core.Config) { c.SequenceIdle = time.Hour })
	for path, want := range map[string]string{"/v2/models/sum/config": `"sequence_batching":{"max_sequence_idle_microseconds":3600000000}`,
		"/v2/models/sum": `"name":"sum"`, "/v2": `"sequence(string_id)"`} {
		rep, err := http.Get(r.http + path)
		must.Do(t, err)
		text, err := io.ReadAll(rep.Body)
		rep.Body.Close()
		must.Do(t, err)
		if got := strings.ReplaceAll(string(text), " ", ""); !strings.Contains(got, want) || strings.Contains(got, "total") {
			t.Errorf("%s: %s", path, got)
		}
	}
}

func TestAnIdleSequenceEnds(t *testing.T) {
	r := summingRig(t, func(c *core.Config) { c.SequenceIdle = 100 * time.Millisecond })
	r.sums(`"sequence_id":7,"sequence_start":true`, 1, 1)
	r.idle()
	r.refused(`"sequence_id":7`, 400, "ends after 100ms without a step", 1)
}

func TestSequencesAreBounded(t *testing.T) {
	r := summingRig(t, func(c *core.Config) { c.Window, c.ClaimWait = 8, time.Second })
	start := func(id int) string { return fmt.Sprintf(`"sequence_id":%d,"sequence_start":true`, id) }
	for id := 1; id <= 4; id++ {
		r.sums(start(id), 1, 1)
	}
	http.DefaultClient.CloseIdleConnections() // a caller keeps its share without a connection
	r.refused(start(5), 429, "share of the window", 1)
	ask := func(address string, id int) error {
		return r.ask(r.connectFrom(address), sumFrom(start(id)))
	}
	for id := 5; id <= 8; id++ {
		must.Do(t, ask("127.0.0.2", id))
	}
	const full = `503 {"error":"sequences of model \"sum\" use all its 8 slots`
	if err := ask("127.0.0.3", 9); err == nil || !strings.Contains(err.Error(), full) {
		t.Errorf("beyond the window: %v", err)
	}
	r.sums(``, 40, 40)
	r.sums(`"sequence_id":8,"sequence_end":true`, 1, 2)
	must.Do(t, ask("127.0.0.3", 9))
}

func TestStepsOfAStreamRunInOrder(t *testing.T) {
	r := summingRig(t, nil)
	s, err := r.client().ModelStreamInfer(soon(t))
	must.Do(t, err)
	const steps, of = 600, 300
	go func() {
		for i := range steps { // three sequences at once; then three others
			if err := s.Send(stepMessage(1+i%3+i/of, i%of < 3, i%of >= of-3)); err != nil {
				t.Error(err)
			}
		}
		_ = s.CloseSend()
	}()
	for i := range steps {
		rep, err := s.Recv()
		must.Do(t, err)
		if want := floats(float32(1 + i%of/3)); rep.ErrorMessage != "" || string(rep.InferResponse.RawOutputContents[0]) != string(want) {
			t.Fatalf("step %d: %v", i, rep)
		}
	}
	r.idle()
}

func TestStepsAtOnceRunOneAfterTheOtherAndAreBounded(t *testing.T) {
	m := summer(t, "sum")
	r := newRig(t, nil, m)
	goOn := make(chan struct{})
	r.worker(m, func(ctx context.Context, b *worker.Batch) error {
		<-goOn
		return sum(ctx, b)
	})
	const most = 256
	answers := make(chan error, most+1)
	step := func(c oip.GRPCInferenceServiceClient, start bool) {
		_, err := c.ModelInfer(soon(t), stepMessage(7, start, false))
		answers <- err
	}
	go step(r.client(), true)
	r.until("the first runs", func() bool { return r.stats("sum").SlotsRunning == 1 })
	c := r.client() // a connection has 256 calls
	for range most {
		go step(c, false)
	}
	if err := <-answers; rpcstatus.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "256 steps waiting") {
		t.Errorf("the last of %d: %v", most+1, err)
	}
	close(goOn)
	for range most {
		must.Check(t, <-answers)
	}
	r.sums(`"sequence_id":7,"sequence_end":true`, 1, most+1)
	r.idle()
}

func TestARestartOfTheBrokerLosesTheState(t *testing.T) {
	m := summer(t, "sum")
	r := newRig(t, nil, m)
	r.worker(m, sum)
	r.sums(`"sequence_id":7,"sequence_start":true`, 1, 1)
	r.broker()
	r.startBroker(m)
	r.until("the model is back", func() bool { return r.infer("sum", stepBody(``, 1)).status == 200 })
	r.refused(`"sequence_id":7`, 409, "begin again with sequence_start", 1)
	r.refused(`"sequence_id":7`, 400, "no sequence 7", 1)
	r.sums(`"sequence_id":7,"sequence_start":true`, 1, 1)
	r.sums(`"sequence_id":7,"sequence_end":true`, 1, 2)
	r.idle()
}

func TestASequenceOfAnAliasStaysWithItsModel(t *testing.T) {
	one, two := summer(t, "m@1"), summer(t, "m@2")
	r := newRig(t, nil, one, two)
	r.worker(one, sum)
	r.worker(two, sum)
	r.alias("m@1=50", "m@2=50")
	r.until("the alias is served", func() bool { return r.infer("m", stepBody(``, 1)).status == 200 })
	versions := map[string]bool{}
	for id := range 8 {
		begun := r.infer("m", stepBody(fmt.Sprintf(`"sequence_id":%d,"sequence_start":true`, id+1), 1))
		versions[begun.Version] = true
		for i := range 5 {
			a := r.infer("m", stepBody(fmt.Sprintf(`"sequence_id":%d`, id+1), 1))
			if a.status != 200 || a.Version != begun.Version || a.Outputs[0].Data[0] != float64(i+2) {
				t.Errorf("sequence %d, step %d: %+v", id, i, a)
			}
		}
	}
	if len(versions) != 2 {
		t.Errorf("sequences began with %v", versions)
	}
}

func TestASequenceOutlivesTheMoveOfItsAlias(t *testing.T) {
	one, two := summer(t, "m@1"), summer(t, "m@2")
	r := newRig(t, func(c *core.Config) { c.Models = []string{"m"} }, one, two)
	r.worker(one, sum)
	r.worker(two, sum)
	r.alias("m@1=100")
	r.until("the alias is served", func() bool { return r.infer("m", stepBody(``, 1)).Version == "1" })
	step := func(parameters string, total float64) {
		t.Helper()
		if a := r.infer("m", stepBody(`"sequence_id":7`+parameters, 1)); a.status != 200 || a.Version != "1" || a.Outputs[0].Data[0] != total {
			t.Errorf("%s: %+v, not %v", parameters, a, total)
		}
	}
	step(`,"sequence_start":true`, 1)
	r.alias("m@2=100")
	r.until("the alias has moved", func() bool { return r.infer("m", stepBody(``, 1)).Version == "2" })
	step(``, 2)
	step(`,"sequence_end":true`, 3)
}

// All callers' sequences are one client of the ring, which pays for failures.
func TestACallerWhoseStepsKeepFailingWaitsAndKeepsItsState(t *testing.T) {
	r := summingRig(t, nil)
	r.sums(`"sequence_id":7,"sequence_start":true`, 1, 1)
	refused := func() *httpAnswer {
		for {
			if a := r.infer("sum", stepBody(`"sequence_id":7`, -1)); a.status != 500 {
				return a
			}
		}
	}
	if a := refused(); a.status != 429 || a.header.Get("Retry-After") == "" || !strings.Contains(a.Error, "sequence 7 keeps its state") {
		t.Errorf("after many failures: %+v", a)
	}
	must.Do(t, r.ask(r.connectFrom("127.0.0.2"), sumFrom(`"sequence_id":7,"sequence_start":true`)))
	r.until("it may go on", func() bool { return r.infer("sum", stepBody(`"sequence_id":7`, 2)).status == 200 })
	r.sums(`"sequence_id":7,"sequence_end":true`, 1, 4)
	r.idle()
}

func TestAStepWhoseAnswerDoesNotFitInSharedMemoryChangesNothing(t *testing.T) {
	r := summingRig(t, sharing)
	key := r.shared("step", make([]byte, 8))
	r.register("out", key, 0, 8).is(t, "", 200)
	r.sums(`"sequence_id":7,"sequence_start":true`, 1, 1)
	step := func(size int) *httpAnswer {
		return r.infer("sum", fmt.Sprintf(`%s,"outputs":[{"name":"y","parameters":{"shared_memory_region":"out","shared_memory_byte_size":%d}}]}`,
			strings.TrimSuffix(stepBody(`"sequence_id":7`, 2), "}"), size))
	}
	step(2).is(t, "two bytes", 400, "takes 4 bytes")
	step(4).is(t, "four bytes", 200)
	r.sums(`"sequence_id":7,"sequence_end":true`, 1, 4)
	r.idle()
}
