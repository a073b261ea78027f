package batcher

import (
	"math"
	"slices"
	"time"
)

// waits is the ladder of waits that replays try, and what came of each. Rung 0
// is no wait; the others go up by a fifth, four of them to the double.
type waits struct {
	rungs      [rungs]rung
	taken      int   // the rung in force
	queue      []int // rungs of the evaluation in progress
	at         Time  // when it began
	evaluation int   // its number
	turn       int
	base       outcome // of no wait, in it
	rate       float64 // of requests, lately
	high       Time    // lately
}

// rung is one wait: what requests cost with it, and what the same ones cost
// without any wait, in all the last replays together.
type rung struct {
	with, without float64
	replays       float64 // how many
	evaluation    int     // that tried it last
	at            Time    // when that began
}

// outcome is what one replay found.
type outcome struct {
	cost     float64 // what is to be small: the mean latency, and a little of the tail
	busy     Time    // of all workers together
	requests int
}

const (
	rungs     = 88
	firstRung = 10 * time.Microsecond
	// forget is the time after which an older score counts for 1/e.
	forget = float64(1500 * time.Millisecond)
	// luck is how far a score of one replay may be off.
	luck = 0.03
)

func rungWait(i int) time.Duration {
	if i == 0 {
		return 0
	}
	return time.Duration(float64(firstRung) * math.Pow(2, float64(i-1)/4))
}

// rungOf is the rung nearest to a wait.
func rungOf(wait Time) int {
	if wait < Time(firstRung) {
		return 1
	}
	return min(rungs-1, 1+int(4*math.Log2(float64(wait)/float64(firstRung))+0.5))
}

// inForce is the wait that was chosen last.
func (w *waits) inForce() Time { return Time(rungWait(w.taken)) }

// plan chooses what to try with so many requests of so long a time: no wait,
// what is in force and its neighbours, and in turn every fourth rung between low
// and high. It says whether the load, or the machine, is another than before;
// then what was found before hardly counts, and all rungs come at once.
func (w *waits) plan(now, low, high Time, requests int, span Time) (news bool) {
	rate := float64(requests) / float64(max(1, span))
	news = max(w.rate, rate) > 4*min(w.rate, rate) || max(w.high, high) > 2*min(w.high, high)
	if news {
		for i := range w.rungs {
			r := &w.rungs[i]
			r.with, r.without, r.replays = r.with*0.01, r.without*0.01, r.replays*0.01
		}
		w.rate, w.high = rate, high
	}
	w.rate += (rate - w.rate) / 4
	w.high += (high - w.high) / 4
	w.at = now
	w.evaluation++
	w.queue = append(w.queue[:0], 0)
	for i := w.taken - 1; w.taken > 0 && i <= w.taken+1; i++ {
		w.add(i)
	}
	first := rungOf(low)
	steps := (rungOf(high)-first)/4 + 1
	some := max(2, 1024/requests)
	if news {
		some = steps
	}
	for range min(some, steps) {
		w.turn++
		w.add(first + 4*(w.turn%steps))
	}
	return news
}

func (w *waits) add(i int) {
	if i > 0 && i < rungs && !slices.Contains(w.queue, i) {
		w.queue = append(w.queue, i)
	}
}

// next is the rung to try, or -1.
func (w *waits) next() int {
	for _, i := range w.queue {
		if w.rungs[i].evaluation != w.evaluation {
			return i
		}
	}
	return -1
}

// tried takes the outcome of the rung that next gave.
func (w *waits) tried(o outcome) {
	i := w.next()
	if i == 0 {
		w.base = o
	}
	r := &w.rungs[i]
	kept := math.Exp(-float64(w.at-r.at) / forget)
	r.evaluation, r.at = w.evaluation, w.at
	r.replays = r.replays*kept + 1
	r.with = r.with*kept + o.cost*float64(o.requests)
	r.without = r.without*kept + w.base.cost*float64(w.base.requests)
}

// choose takes the wait that did best lately. A score of few replays is partly
// luck, and the best of many such scores mostly is: so what is in force goes
// only for one that is better by more than that.
func (w *waits) choose() {
	best, bestScore := w.taken, w.score(w.taken)
	for i := range w.rungs {
		if !w.lately(i) {
			continue
		}
		if score := w.score(i) * (1 + luck/math.Sqrt(w.rungs[i].replays)); i != w.taken && score < bestScore {
			best, bestScore = i, score
		}
	}
	w.taken = best
}

// score is what requests cost with a wait, as a multiple of what they cost
// without.
func (w *waits) score(i int) float64 { return w.rungs[i].with / w.rungs[i].without }

func (w *waits) lately(i int) bool {
	r := &w.rungs[i]
	return r.without > 0 && w.evaluation-r.evaluation < 6
}
