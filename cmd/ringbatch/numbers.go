// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
)

// numbersLast puts the flags first, then "--" and everything else: to pflag
// the number -1 would be a flag. A flag's own value stays with it.
func numbersLast(f *pflag.FlagSet, args []string) []string {
	var flags, rest []string
	for i := 0; i < len(args); i++ {
		arg := args[i]
		if arg == "--" {
			rest = append(rest, args[i+1:]...)
			break
		}
		_, err := strconv.ParseFloat(arg, 64)
		if !strings.HasPrefix(arg, "-") || err == nil || errors.Is(err, strconv.ErrRange) {
			rest = append(rest, arg)
			continue
		}
		flags = append(flags, arg)
		if known := f.Lookup(strings.TrimPrefix(arg, "--")); known != nil && known.NoOptDefVal == "" {
			if i+1 == len(args) {
				return flags // pflag says that its value is missing
			}
			i++
			flags = append(flags, args[i])
		}
	}
	return append(append(flags, "--"), rest...)
}
