// SPDX-License-Identifier: Apache-2.0

package batcher

// Where batches have several shapes, one may take far longer than another. By what all of
// them take together, or took at least, a quick shape that did not run for a while would
// be refused beside a slow one that does; and it would never run again. So whether a
// request is in time is judged by its own shape. One of which little is known is tried.

// floorOf is the floor of a request's shape; nil if it has none.
func (l *learner) floorOf(d *Dims) *floor {
	if len(l.shapes) == 1 {
		return &l.floor
	}
	if shape := l.knownShape(d); shape > 0 {
		return &l.shapes[shape].floor
	}
	return nil
}

// hopedOf is hoped for a batch of a shape.
func (l *learner) hopedOf(d *Dims, rows, others int) Time {
	all := l.hoped(rows, others)
	if len(l.shapes) == 1 || *d == (Dims{}) {
		return all
	}
	return min(all, l.hopedOfShape(l.knownShape(d), rows, others))
}

func (l *learner) hopedOfShape(shape, rows, others int) Time {
	if c := &l.shapes[shape]; shape > 0 && c.batches >= youngPoint {
		return Time(l.safety * c.expected(rows, others))
	}
	return 0
}

// occupiedBy is how long a worker has a batch that it was given.
func (l *learner) occupiedBy(p *pacedBatch) Time {
	if took := l.hopedOfShape(p.shape, p.rows, p.others); took > 0 {
		return took + l.hand
	}
	return l.occupied(p.rows, p.others)
}

// knownShape is the place of a shape in shapes; 0 for those that have none. Once all places are
// taken those without one share the last: of what is never learned all would be tried.
func (l *learner) knownShape(d *Dims) int {
	for i := 1; i < len(l.shapes); i++ {
		if l.shapes[i].dims == *d {
			return i
		}
	}
	if len(l.shapes) > maxLearnedShapes && *d != (Dims{}) {
		return maxLearnedShapes
	}
	return 0
}
