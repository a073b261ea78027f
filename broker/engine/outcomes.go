// SPDX-License-Identifier: Apache-2.0

package engine

// outcome is a consequence of an entry for the peer that wrote it. It may requeue
// requests, end other clients' requests, or kill a process. So the loop collects
// outcomes while it reads entries, and applies them at one place: after everything
// is read, and before the stages decide. The books about requests follow at once.
type outcome struct {
	kind   outcomeKind
	client *ClientSession // or
	worker *WorkerSession
	err    error // brokeRules
}

type outcomeKind uint8

const (
	brokeRules   outcomeKind = iota // a client or worker broke the protocol
	doneAtLast                      // a worker that was given up has finished its batches
	failsOften                      // a worker fails batches that others run
	windowUnused                    // the last request of a client that left has ended
)

func (l *Loop) collectOutcome(o outcome) { l.outcomes = append(l.outcomes, o) }

// applyOutcomes applies all outcomes. Most of them are void if the peer has gone since.
func (l *Loop) applyOutcomes() {
	for i := 0; i < len(l.outcomes); i++ { // applying one may add another
		o := &l.outcomes[i]
		switch {
		case o.kind == windowUnused:
			o.client.ring.returnWindowIfDone(o.client)
		case o.client != nil:
			o.client.ring.disconnectClient(o.client, o.err)
		case o.kind == brokeRules:
			o.worker.stage.disconnectWorker(o.worker, o.err)
		case o.kind == doneAtLast:
			o.worker.stage.takeBackWorker(o.worker)
		case o.kind == failsOften:
			o.worker.stage.suspendWorker(o.worker)
		}
	}
	clear(l.outcomes)
	l.outcomes = l.outcomes[:0]
}

func (o *outcome) ring() *Ring {
	if o.client != nil {
		return o.client.ring
	}
	return o.worker.stage.ring
}
