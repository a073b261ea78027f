// SPDX-License-Identifier: Apache-2.0

//go:build !amd64

package mlp

func available() []*kernel { return []*kernel{portable()} }
