// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"time"
)

// The random grid: models, workers and loads that nobody chose. Another seed draws
// others, so that nothing can have been made to fit them.

const randomGridCells = 300

func randomCells(requests int, seed uint64) (cells []gridCell, err error) {
	d := draw{rand.New(rand.NewPCG(seed, 0))}
	for range randomGridCells {
		p := gridPlan{batch: 8 << d.IntN(5)}
		m := gridModel{cost: d.cost(p.batch)}
		m.name = m.cost
		cost, err := ParseCost(m.cost)
		if err != nil {
			return nil, err
		}
		w, l := d.workers(), d.load(p.batch)
		rows := 1
		if d.IntN(3) == 0 {
			rows = 4
		}
		c := p.cell(m, cost, w, l, rows, requests, d.Uint64()>>1)
		c.name += fmt.Sprintf(", batches of %d", p.batch)
		if l.on > 0 {
			c.name += fmt.Sprintf(", on %v off %v", l.on, l.off)
		}
		cells = append(cells, c)
	}
	return cells, nil
}

// draw is a source of chance.
type draw struct{ *rand.Rand }

// between is a number between two, each of its magnitudes as likely.
func (d draw) between(low, high float64) float64 {
	return low * math.Pow(high/low, d.Float64())
}

func (d draw) time(low, high time.Duration) time.Duration {
	return time.Duration(d.between(float64(low), float64(high))).Round(low / 10)
}

// cost is of a model that takes some time for a batch, whatever its size, and some for
// its rows: for each as much, or more for the first ones, or for the last.
func (d draw) cost(batch int) string {
	one, share, bend := d.between(30e3, 20e6), d.between(0.001, 1), d.between(0.5, 1.3)
	points := []string{}
	for rows := 1; rows <= batch; rows *= 2 {
		took := time.Duration(one * (1 - share + share*math.Pow(float64(rows), bend)))
		points = append(points, fmt.Sprintf("%d=%v", rows, took.Round(time.Microsecond)))
	}
	return strings.Join(points, ",")
}

func (d draw) workers() gridWorkers {
	w := gridWorkers{count: 1 + d.IntN(4)}
	if w.count > 1 && d.IntN(2) == 0 {
		w.sharing = float64(1+d.IntN(10)) / 10
	}
	return w
}

func (d draw) load(batch int) gridLoad {
	l := gridLoad{name: "poisson", share: math.Round(100*d.between(0.02, 0.95)) / 100}
	switch d.IntN(10) {
	case 0, 1:
		l.name, l.on, l.off = "bursty", d.time(5*time.Millisecond, 100*time.Millisecond), d.time(5*time.Millisecond, 200*time.Millisecond)
	case 2:
		l.name, l.on, l.off = "on/off", d.time(300*time.Millisecond, 2*time.Second), d.time(300*time.Millisecond, 2*time.Second)
	case 3, 4, 5:
		l = gridLoad{clients: int(d.between(2, float64(4*batch))), inFlight: 1}
		if d.IntN(3) == 0 {
			l.inFlight = 2 + d.IntN(3)
		}
		if d.IntN(2) == 0 {
			l.think = d.between(0.1, 4)
		}
	}
	if l.on > 0 { // no more while it is on than can be done
		l.share = math.Round(1000*l.share*float64(l.on)/float64(l.on+l.off)) / 1000
	}
	return l
}
