// SPDX-License-Identifier: Apache-2.0

// Package auto learns how long the batcher should wait (wait_time "auto",
// latency_goal) and which requests would be late. Its Advisor implements
// batcher.Advisor; NewBatcher wires the two together.
package auto
