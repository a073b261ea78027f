// SPDX-License-Identifier: Apache-2.0

// Package auto learns how long the batcher should wait (wait_time "auto",
// latency_goal), and which requests would be late. Its Advisor implements
// batcher.Advisor; NewBatcher wires the two together. It is as pure as the batcher.
//
//	advisor.go    the Advisor, the requests that it remembers, and what people can see
//	costs.go      what batches cost
//	workers.go    batches that run: which others wait for them, and which requests are late
//	evaluate.go   when to replay, with which candidates, and which of them is best
//	replay.go     one replay: requests, workers, and which request follows which answer
//	constants.go  all figures that were chosen
//
// `bench waits` judges a change. Tune and judge with different seeds. Add no rule for the last cells.
package auto
