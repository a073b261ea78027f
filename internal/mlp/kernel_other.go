//go:build !amd64

package mlp

func available() []*kernel { return []*kernel{portable()} }
