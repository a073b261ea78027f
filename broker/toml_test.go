package broker

import (
	"errors"
	"testing"

	"github.com/ringbatch/ringbatch/status"
)

const plainModel = "[[model]]\nname = \"m\"\ninputs = [\"x:f32[4]\"]\noutputs = [\"y:f32[4]\"]\n"

func TestAZeroThatIsWrittenDownIsNotTakenForTheDefault(t *testing.T) {
	cfg, err := ParseConfig("drain_time = 0\n" + plainModel + "wait_time = 0\n")
	if err != nil {
		t.Fatal(err)
	}
	cfg.fill()
	if cfg.DrainTime > 0 {
		t.Errorf("drain_time = 0 became %v", cfg.DrainTime)
	}
	if _, err := cfg.Models[0].fill(); err != nil || cfg.Models[0].Policy.WaitTime != 0 {
		t.Errorf("wait_time = 0 became %v, %v", cfg.Models[0].Policy.WaitTime, err)
	}
	if _, err := ParseConfig(plainModel + "lease = 0\n"); !errors.Is(err, status.ErrInvalid) {
		t.Errorf("lease = 0: %v", err)
	}
}

func TestADurationIsANumber(t *testing.T) {
	for _, key := range []string{"wait_time", "lease", "ageing"} {
		for _, value := range []string{"nan", "-nan", "inf", "-1", "true", "[1]", "\"soon\""} {
			if _, err := ParseConfig(plainModel + key + " = " + value + "\n"); !errors.Is(err, status.ErrInvalid) {
				t.Errorf("%s = %s: %v", key, value, err)
			}
		}
	}
}

func TestACountIsOneOrMore(t *testing.T) {
	for _, text := range []string{"max_clients = 0\n" + plainModel, plainModel + "slots = 0\n", plainModel + "max_batch_size = 0\n", plainModel + "max_batch_size = 1.5\n", plainModel + "[[model.worker]]\ncommand = [\"w\"]\ninstances = 0\n"} {
		if _, err := ParseConfig(text); !errors.Is(err, status.ErrInvalid) {
			t.Errorf("%s\n%v", text, err)
		}
	}
}

func TestLimitsThatLetNobodyInAreRefused(t *testing.T) {
	if b, err := New(Config{Socket: t.TempDir() + "/s/b", MaxClients: -1}); !errors.Is(err, status.ErrInvalid) {
		t.Errorf("max_clients -1: %v", err)
		if b != nil {
			b.release()
		}
	}
}

func TestAReloadThatDeclaresAModelTwiceIsRefusedWhole(t *testing.T) {
	s := supervise(t, nil)
	for _, again := range []string{"m", "new"} {
		m := s.b.cfg.Models[0]
		m.Name, m.Policy.MaxBatchSize = again, 8
		if err := s.b.Reload(Config{Models: []ModelConfig{m, m}}); !errors.Is(err, status.ErrInvalid) {
			t.Errorf("%s twice: %v", again, err)
		}
	}
	if st := s.stats(); len(st.Models) != 1 || st.Models[0].MaxBatchSize != DefaultMaxBatchSize {
		t.Errorf("it changed something: %+v", st.Models)
	}
}
