// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/ringbatch/ringbatch/internal/backoff"
	"github.com/ringbatch/ringbatch/internal/typo"
	"github.com/ringbatch/ringbatch/status"
)

// Ready returns nil if each of these models, or each model if none is named, has a
// ready worker: idle, or in a batch that does not take unusually long. A model that sleeps
// or wakes is ready, too: a request waits for its workers. An alias
// counts as all its models. Otherwise the error names the models without one, and
// why. A broker that drains or has no model is not ready.
func (c *Client) Ready(ctx context.Context, models ...string) error {
	list, rep, err := c.models(ctx)
	switch {
	case err != nil:
		return err
	case rep.Draining:
		return status.ErrDraining
	case len(list) == 0:
		return fmt.Errorf("%w: it has none yet", status.ErrUnknownModel)
	}
	models = modelsOf(models, aliases(rep))
	var not []error
	var there []string
	for i := range list {
		there = append(there, list[i].Name)
	}
	for _, name := range models {
		if !slices.Contains(there, name) {
			not = append(not, fmt.Errorf("%w: %q%s; ringbatch models lists them", status.ErrUnknownModel, name, typo.DidYouMean(name, there)))
		}
	}
	for i := range list {
		if m := &list[i]; m.Ready == 0 && !m.Asleep && (len(models) == 0 || slices.Contains(models, m.Name)) {
			not = append(not, fmt.Errorf("model %q is not ready: %s", m.Name, m.NotReady))
		}
	}
	return errors.Join(not...)
}

func modelsOf(names []string, known []Alias) (models []string) {
	for _, name := range names {
		if i := slices.IndexFunc(known, func(a Alias) bool { return a.Name == name }); i >= 0 {
			for _, t := range known[i].To {
				models = append(models, t.Model)
			}
			continue
		}
		models = append(models, name)
	}
	return models
}

// WaitReady waits until Ready is nil, or returns its last error when ctx ends.
func (c *Client) WaitReady(ctx context.Context, models ...string) error {
	var why error
	var pause backoff.Backoff
	for {
		err := c.Ready(ctx, models...)
		if err == nil {
			return nil
		}
		if why == nil || ctx.Err() == nil && !errors.Is(err, context.DeadlineExceeded) { // a timeout explains nothing
			why = err
		}
		if !pause.Wait(ctx) {
			return why
		}
	}
}
