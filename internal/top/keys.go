// SPDX-License-Identifier: Apache-2.0

package top

// key is a key that was pressed: a printable character, or one of these.
type key int

const (
	keyNone key = -iota
	keyUp
	keyDown
	keyLeft
	keyRight
	keyHome
	keyEnd
	keyPageUp
	keyPageDown
)

const (
	ctrlC         key = 3
	ctrlL         key = 12
	ctrlZ         key = 26
	ctrlBackslash key = 28
)

// keyboard makes keys of a terminal's bytes. A sequence may come in pieces.
type keyboard struct {
	state     keyboardState
	parameter byte
}

type keyboardState int

const (
	betweenKeys keyboardState = iota
	afterEscape
	inSequence // after ESC [ or ESC O
)

var (
	letterKeys = map[byte]key{'A': keyUp, 'B': keyDown, 'C': keyRight, 'D': keyLeft, 'H': keyHome, 'F': keyEnd}
	numberKeys = map[byte]key{'1': keyHome, '4': keyEnd, '5': keyPageUp, '6': keyPageDown, '7': keyHome, '8': keyEnd}
)

// press takes the next byte, and returns the key that it completes, if any.
func (k *keyboard) press(b byte) key {
	const escape = 0x1b
	switch {
	case b == escape:
		k.state = afterEscape
	case k.state == afterEscape && (b == '[' || b == 'O'):
		k.state, k.parameter = inSequence, 0
	case k.state == inSequence && b >= 0x20 && b < 0x40:
		if k.parameter == 0 {
			k.parameter = b
		}
	case k.state == inSequence:
		k.state = betweenKeys
		if b == '~' {
			return numberKeys[k.parameter]
		}
		return letterKeys[b]
	case b < 0x80:
		k.state = betweenKeys
		return key(b)
	}
	return keyNone
}
