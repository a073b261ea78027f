// SPDX-License-Identifier: Apache-2.0

// Package inside is the part of a worker that only the relay and the CUDA workers of
// this module use. It travels in contexts, so that package worker does not show it.
package inside

import (
	"context"

	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/policy"
)

// Worker is the inner side of a worker.Worker.
type Worker interface {
	// Session has the mappings. After a call Batch.Complete no longer checks that all
	// outputs were written.
	Session() *attach.Session

	// Settings are the model's policy when this worker attached.
	Settings() policy.Settings

	// SetLanes sets the number of batches, 1 … Depth, that this worker runs at once from
	// now on. The broker hands over no more; further requests wait in the queue, where
	// batches grow. The broker reads the number when it next reads a batch's end.
	SetLanes(n int)

	// Polite has Next leave the cores to goroutines that complete batches.
	Polite()

	// Leave is Close without unmapping: views into batches stay readable.
	Leave()

	// Abandon makes Close do nothing: the memory stays mapped, and taken batches stay
	// unanswered, because a device or a transport may still use them. Unless Leave was
	// called before, the process must end: the broker runs its batches again elsewhere.
	Abandon()
}

type (
	workerKey struct{}
	deviceKey struct{}
)

// With is a context for the function of worker.KeepAttached.
func With(ctx context.Context, w Worker) context.Context {
	return context.WithValue(ctx, workerKey{}, w)
}

// Of is the inner side of the worker that worker.KeepAttached has attached.
func Of(ctx context.Context) Worker { return ctx.Value(workerKey{}).(Worker) }

// WithDevice is a context that attaches workers with a GPU. The worker closes it.
func WithDevice(ctx context.Context, d attach.Device) context.Context {
	return context.WithValue(ctx, deviceKey{}, d)
}

// DeviceOf is the GPU of WithDevice, or nil.
func DeviceOf(ctx context.Context) attach.Device {
	d, _ := ctx.Value(deviceKey{}).(attach.Device)
	return d
}
