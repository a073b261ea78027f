package batcher

import "testing"

func TestSmoke(t *testing.T) {
	b, err := New(Config{MaxBatchSize: 4, WaitTime: 1000})
	if err != nil {
		t.Fatal(err)
	}
	b.WorkerReady(Worker{ID: 0})
	b.ClientJoined(9)
	for i := range 3 {
		if err := b.Arrive(10, Request{ID: RequestID(i), Client: ClientID(i), Rows: 1, Arrived: 10, Deadline: Never}); err != nil {
			t.Fatal(err)
		}
	}
	if d := b.Decide(10); len(d.Dispatches) != 0 || d.Wake != 1010 {
		t.Fatalf("%+v", d)
	}
	if d := b.Decide(1010); len(d.Dispatches) != 1 || d.Dispatches[0].Rows != 3 || d.Dispatches[0].Why != Deadline {
		t.Fatalf("%+v", d)
	}
}
