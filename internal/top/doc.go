// SPDX-License-Identifier: Apache-2.0

// Package top is `ringbatch top`: what the broker does, live in a terminal,
// with the content of the page that the gateway serves.
//
//	terminal   raw mode, the other screen, what has to be put back at the end
//	keys       bytes of the keyboard → keys
//	feed       asks the broker, beside the loop that draws
//	view       what is shown and chosen; changed by keys and snapshots only
//	draw       view → lines of the screen (pure)
//	line       one line: printable, and never wider than the screen
//
// Texts of peers reach the terminal through line.add alone, which escapes what
// does not print.
package top
