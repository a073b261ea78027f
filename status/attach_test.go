package status

import "testing"

func TestEveryStatusIsFinalForAWorkerThatAttachesOrTriedAgain(t *testing.T) {
	for _, s := range All() {
		if attachOutcomes[s] == unclassified {
			t.Errorf("say in attachOutcomes what a worker does when attaching ends with %s", s.Name())
		}
	}
	for _, s := range []Code{ErrVersion, ErrLayout, ErrSignatureMismatch, ErrForbidden, ErrInvalid, Code(200)} {
		if s.RetryAttach() {
			t.Errorf("a worker would try for ever after %s", s.Name())
		}
	}
	for _, s := range []Code{ErrNoBroker, ErrBrokerGone, ErrDraining} {
		if !s.RetryAttach() {
			t.Errorf("a worker would not outlast a restart of its broker: %s", s.Name())
		}
	}
}
