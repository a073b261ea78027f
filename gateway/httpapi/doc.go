// SPDX-License-Identifier: Apache-2.0

// Package httpapi is the gateway's HTTP door: paths, JSON, and binary bodies that
// go from the socket into slots.
package httpapi
