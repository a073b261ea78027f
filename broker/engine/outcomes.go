// SPDX-License-Identifier: Apache-2.0

package engine

// The loop reads entries of clients and workers in the middle of a round. The books
// about requests follow at once. An outcome is a consequence for the peer itself. It
// may requeue requests, end other clients' requests, or kill a process. So the loop
// collects outcomes and applies them at one place: after everything is read, and
// before the stages decide.
type outcome struct {
	kind   outcomeKind
	client *ClientSession // or
	worker *WorkerSession
	err    error // brokeRules
}

type outcomeKind uint8

const (
	brokeRules outcomeKind = iota // a client or worker broke the protocol
	doneAtLast                    // a worker that was given up has no batches any more
	failsOften                    // a worker fails batches that others run
)

func (l *Loop) collectOutcome(o outcome) { l.outcomes = append(l.outcomes, o) }

// applyOutcomes applies all outcomes. Most of them are void if the peer has gone since.
func (l *Loop) applyOutcomes() {
	for i := 0; i < len(l.outcomes); i++ { // applying one may add another
		o := &l.outcomes[i]
		switch w := o.worker; {
		case o.client != nil:
			o.client.ring.disconnectClient(o.client, o.err)
		case o.kind == brokeRules:
			w.stage.disconnectWorker(w, o.err)
		case o.kind == doneAtLast:
			w.stage.takeBackWorker(w)
		case o.kind == failsOften:
			w.stage.suspendWorker(w)
		}
	}
	clear(l.outcomes)
	l.outcomes = l.outcomes[:0]
}

// ringOf is the ring of the outcome's peer.
func (o *outcome) ringOf() *Ring {
	if o.client != nil {
		return o.client.ring
	}
	return o.worker.stage.ring
}
