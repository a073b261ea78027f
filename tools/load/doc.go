// SPDX-License-Identifier: Apache-2.0

// Package load measures a running model under load, for `ringbatch bench` and the benchmarks: producers,
// windows, figures, the report. docs/benchmark.md is its manual.
package load
