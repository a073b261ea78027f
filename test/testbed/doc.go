// SPDX-License-Identifier: Apache-2.0

// Package testbed runs brokers, workers and clients as processes, for the end-to-end
// tests, the chaos campaigns and the benchmark. It starts the rig's own binary again in
// a role.
//
//	func main() {
//		testbed.Play(roles) // a process of the bed runs its role and exits here
//		bed, err := testbed.New(ctx)
//		defer bed.Close() // no process and no folder is left
//		p, err := bed.Start(testbed.Spec{Role: "worker", Job: job})
//		err = p.Expect("ready", nil, time.Minute)
//
// Parent and child speak JSON: the job and then commands on the child's standard
// input, named messages on its standard output. Its standard error is its log; errors
// about the child quote the end of the log.
//
// No process outlives the bed. Close kills them, the end of the bed's context (Ctrl-C)
// kills them, and the kernel kills them if the parent dies.
package testbed
