// SPDX-License-Identifier: Apache-2.0

// Package staffing decides which models have workers, and how many. Its rules are pure:
// functions of observations and the time, tested by the scripts in testdata.
//
//   - room.go: who gets the memory of the GPUs
//   - follow.go: how many workers a load needs
//
// Package broker observes the models and carries the decisions out (staff.go).
package staffing

import "time"

// Time is a moment on the caller's clock.
type Time = time.Duration

// State says whether a model has workers.
//
//	       a request, or by hand        a worker of each stage attached
//	asleep ─────────────────────► waking ─────────────────────► awake
//	   ▲                            │                             │ idle, by hand,
//	   │ the workers have ended     ▼ no start succeeds           ▼ or another needs its room
//	   └───────────────────────── ending ◄────────────────────────┘
type State uint8

// The states of a model.
const (
	Asleep State = iota
	Waking
	Awake
	Ending
)

var names = [...]string{"asleep", "waking", "awake", "ending"}

func (s State) String() string { return names[s] }
