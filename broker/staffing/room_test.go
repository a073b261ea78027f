// SPDX-License-Identifier: Apache-2.0

package staffing

import (
	"fmt"
	"maps"
	"math/rand"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/must"
)

const (
	step    = 500 * time.Millisecond
	endTime = 500 * time.Millisecond
)

// house is a world of models that only the rule of room changes.
type house struct {
	budgets Bytes
	tenants []Tenant
	start   []Time
	load    [][2]Time
	events  []string
}

func (h *house) move(i int, to State, now Time, why string) {
	h.tenants[i].State, h.tenants[i].Since = to, now
	h.events = append(h.events, fmt.Sprintf("%v %s %v%s", now, h.tenants[i].Name, to, why))
}

// run is what package broker does with the rule.
func (h *house) run(now Time) {
	for i := range h.tenants {
		t := &h.tenants[i]
		busy := now >= h.load[i][0] && now < h.load[i][1]
		if t.Busy = busy; busy {
			t.Used = now
		}
		switch {
		case t.State == Waking && now-t.Since >= h.start[i]:
			t.Took = h.start[i]
			since := t.Since
			h.move(i, Awake, now, "")
			t.Since = since
		case t.State == Ending && now-t.Since >= endTime:
			h.move(i, Asleep, now, "")
			t.Waits = false
		}
		if wants := t.State == Asleep && busy; wants != t.Waits {
			t.Waits, t.Since = wants, now
		}
	}
	p := Room(now, h.budgets, h.tenants)
	of := func(name string) int {
		return slices.IndexFunc(h.tenants, func(t Tenant) bool { return t.Name == name })
	}
	head := line(h.tenants)
	for _, name := range p.Wake {
		h.move(of(name), Waking, now, "")
		h.tenants[of(name)].Waits = false
	}
	for _, name := range p.Sleep {
		h.move(of(name), Ending, now, " for "+head[0].Name)
	}
	used := Bytes{}
	for i := range h.tenants {
		for g, n := range h.tenants[i].Needs {
			if h.tenants[i].State != Asleep {
				used[g] += n
			}
		}
	}
	for g, n := range used {
		if n > h.budgets[g] {
			h.events = append(h.events, fmt.Sprintf("%v GPU %d holds %d of %d", now, g, n, h.budgets[g]))
		}
	}
}

func TestRoomIsSharedAsTheScriptsSay(t *testing.T) {
	text, err := os.ReadFile("testdata/room.txt")
	must.Do(t, err)
	for _, script := range strings.Split(string(text), "\n\n")[1:] {
		name, rest, _ := strings.Cut(strings.TrimSpace(script), "\n")
		t.Run(name, func(t *testing.T) { checkScript(t, strings.Split(rest, "\n")) })
	}
}

func checkScript(t *testing.T, lines []string) {
	h := &house{budgets: Bytes{}}
	var want []string
	var until Time
	for _, line := range lines {
		f := strings.Fields(line)
		switch f[0] {
		case "gpu":
			h.budgets[atoi(t, f[1])] = int64(atoi(t, f[2]))
		case "model":
			h.addModel(t, f[1:])
		case "until":
			until = duration(t, f[1])
		default:
			want = append(want, line)
		}
	}
	for now := Time(0); now <= until; now += step {
		h.run(now)
	}
	if !slices.Equal(h.events, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(h.events, "\n"), strings.Join(want, "\n"))
	}
}

func (h *house) addModel(t *testing.T, fields []string) {
	x, gpu, needs := Tenant{Name: fields[0]}, 0, 0
	var start Time
	var load [2]Time
	for _, field := range fields[1:] {
		switch key, value, _ := strings.Cut(field, "="); key {
		case "gpu":
			gpu = atoi(t, value)
		case "needs":
			needs = atoi(t, value)
		case "start":
			start = duration(t, value)
		case "load":
			from, to, _ := strings.Cut(value, "-")
			load = [2]Time{duration(t, from), duration(t, to)}
		case "stays":
			x.Stays = true
		default:
			t.Fatalf("unknown field %q", field)
		}
	}
	x.Needs = Bytes{gpu: int64(needs)}
	h.tenants, h.start, h.load = append(h.tenants, x), append(h.start, start), append(h.load, load)
}

func atoi(t *testing.T, text string) int {
	n, err := strconv.Atoi(text)
	must.Do(t, err)
	return n
}

func duration(t *testing.T, text string) Time {
	d, err := time.ParseDuration(text)
	must.Do(t, err)
	return d
}

// Twenty models with room for about five, under random load.
func TestNoModelWaitsForEverAndNoBudgetIsExceeded(t *testing.T) {
	for seed := range int64(10) {
		r := rand.New(rand.NewSource(seed))
		h := &house{budgets: Bytes{0: 20, 1: 20}}
		for i := range 20 {
			h.tenants = append(h.tenants, Tenant{Name: fmt.Sprint("m", i), Needs: Bytes{r.Intn(2): int64(1 + r.Intn(10))}})
			h.start, h.load = append(h.start, Time(r.Intn(5000))*time.Millisecond), append(h.load, [2]Time{})
		}
		// The longest line is all others, each for a turn of four starts, its start and its end.
		const longest = 20 * (turnStarts + 1) * 5 * time.Second
		waits := map[string]Time{}
		for now := Time(0); now < 30*time.Minute; now += step {
			if i := r.Intn(20); r.Intn(10) == 0 {
				h.load[i] = [2]Time{now, now + Time(r.Intn(600))*time.Second}
			}
			h.run(now)
			for i := range h.tenants {
				x := &h.tenants[i]
				if x.Waits && x.State == Asleep && x.Busy {
					if waits[x.Name] += step; waits[x.Name] > longest {
						t.Fatalf("seed %d: %s waits since %v at %v: %v", seed, x.Name, x.Since, now, h.events[max(0, len(h.events)-20):])
					}
				} else {
					delete(waits, x.Name)
				}
			}
		}
		for _, e := range h.events {
			if strings.Contains(e, "holds") {
				t.Errorf("seed %d: %s", seed, e)
			}
		}
	}
}

func TestAWaitingModelLearnsWhoHoldsItsRoom(t *testing.T) {
	list := []Tenant{
		{Name: "a", State: Awake, Needs: Bytes{0: 6}, Stays: true}, {Name: "x", State: Awake, Needs: Bytes{1: 6}},
		{Name: "b", Waits: true, Needs: Bytes{0: 6}}, {Name: "c", Waits: true, Since: 1, Needs: Bytes{0: 3}},
	}
	p := Room(time.Hour, Bytes{0: 10, 1: 10}, list)
	want := map[string]string{"b": "a held the room of GPU 0", "c": "a held the room of GPU 0"}
	if len(p.Wake)+len(p.Sleep) > 0 || !maps.Equal(p.Holders, want) {
		t.Errorf("%+v", p)
	}
	if Fits(Bytes{0: 10, 1: 10}, Bytes{0: 1}, list) || !Fits(Bytes{0: 10, 1: 10}, Bytes{1: 4}, list) {
		t.Error("room that somebody waits for counts as free, or free room does not")
	}
}
