// SPDX-License-Identifier: Apache-2.0

//go:build !xds

package relay

const xdsBuiltIn = false
