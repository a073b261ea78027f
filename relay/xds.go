// SPDX-License-Identifier: Apache-2.0

//go:build xds

package relay

import _ "google.golang.org/grpc/xds" // the resolver and balancers of xds:/// targets

// xdsBuiltIn tells that xds:/// targets can be used. They double the size of
// the program, hence the build tag.
const xdsBuiltIn = true
