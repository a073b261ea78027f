// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"net/http"
	"sync"

	"google.golang.org/grpc/codes"
)

// callers keeps what each caller has in flight, over all its connections.
type callers struct {
	mostRequests, mostBytes int64

	mu     sync.Mutex
	byName map[string]*usage
}

// join finds the usage of a name; leave ends it.
func (c *callers) join(name string) *usage {
	c.mu.Lock()
	defer c.mu.Unlock()
	u := c.byName[name]
	if u == nil {
		u = &usage{}
		c.byName[name] = u
	}
	u.holders++
	return u
}

func (c *callers) leave(name string, u *usage) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if u.holders--; u.holders == 0 {
		delete(c.byName, name)
	}
}

// begin counts a request, or refuses it.
func (c *callers) begin(u *usage) error {
	if u.requests.Add(1) > c.mostRequests {
		u.requests.Add(-1)
		return refuse(http.StatusTooManyRequests, codes.ResourceExhausted, "this caller has %d requests in flight, no more are taken", c.mostRequests)
	}
	return nil
}

func (c *callers) end(u *usage) { u.requests.Add(-1) }

// take counts n bytes of a request that has so many already, or refuses them.
func (c *callers) take(u *usage, n, has int) error {
	if all := int64(has) + int64(n); all > c.mostBytes { // to try again would not help
		return refuse(http.StatusRequestEntityTooLarge, codes.ResourceExhausted, "a message of %d bytes; one caller may have %d in flight", all, c.mostBytes)
	}
	if u.bytes.Add(int64(n)) > c.mostBytes {
		u.bytes.Add(-int64(n))
		return refuse(http.StatusTooManyRequests, codes.ResourceExhausted, "with this message the caller would have more than %d bytes in flight, try again", c.mostBytes)
	}
	return nil
}

func (c *callers) giveBack(u *usage, n int) { u.bytes.Add(-int64(n)) }
