package status

// attachOutcome says what a worker does after an attempt to attach that ended
// with some status.
type attachOutcome uint8

const (
	unclassified attachOutcome = iota // a test refuses it
	final                             // it ends with the error: a person has to change something
	again                             // it tries again, later each time
)

// attachOutcomes has all statuses, also those that an attach never ends with:
// if one of them came, ending would be better than trying for ever.
var attachOutcomes = [statusCount]attachOutcome{
	// A broker that is restarted, or not started yet.
	ErrNoBroker:   again,
	ErrBrokerGone: again,
	ErrDraining:   again,
	ErrTimeout:    again, // it did not answer in time
	// A broker or a host that has no room just now.
	ErrRingFull: again,
	ErrNoMemory: again,

	// Another build, another model, another user: the next try would end alike.
	ErrVersion:           final,
	ErrLayout:            final,
	ErrProtocol:          final,
	ErrSignatureMismatch: final,
	ErrUnknownModel:      final,
	ErrForbidden:         final,
	ErrInvalid:           final,
	ErrDType:             final,
	ErrShape:             final,
	ErrRows:              final,
	ErrSize:              final,
	ErrTooLarge:          final,
	ErrNoLevel:           final,
	ErrOutputTooSmall:    final,
	ErrNoGPU:             final,
	ErrForked:            final,
	ErrClosed:            final,
	ErrBrokerRunning:     final,

	// Ends and states of requests.
	OK:              final,
	ErrFailed:       final,
	ErrExpired:      final,
	ErrCanceled:     final,
	ErrQueueFull:    final,
	ErrQueueTimeout: final,
	ErrWorkerDied:   final,
	ErrWorkerHung:   final,
	ErrFull:         final,
	ErrReleased:     final,
	ErrCommitted:    final,
	ErrNotCommitted: final,
	ErrNotDone:      final,
}

// RetryAttach reports whether a worker whose attempt to attach ended with s
// should try again: nobody has to change anything for it to succeed later.
func (s Code) RetryAttach() bool { return s < statusCount && attachOutcomes[s] == again }
