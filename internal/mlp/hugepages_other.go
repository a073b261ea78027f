//go:build !linux

package mlp

func adviseHugePages([]float32) {}
