// SPDX-License-Identifier: Apache-2.0

// Package testbed is the one rig under the end-to-end tests, the chaos
// campaigns and the benchmark: it starts brokers, workers and clients as
// processes of their own, by running the rig's own binary again in a role.
//
//	func main() {
//		testbed.Play(roles) // a process of the bed plays its role and ends here
//		bed, err := testbed.New(ctx)
//		defer bed.Close() // no process and no folder is left
//		p, err := bed.Start(testbed.Spec{Role: "worker", Job: job})
//		err = p.Expect("ready", nil, time.Minute)
//
// Parent and child speak JSON: the job and then commands on the child's
// standard input, messages with a name on its standard output. Whatever it
// writes to standard error is its log, the end of which is part of every
// error about it.
//
// No process outlives the bed: Close kills them, so does the end of the bed's
// context (Ctrl-C), and so does the kernel if the parent itself is killed.
package testbed
