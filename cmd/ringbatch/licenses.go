// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	_ "embed"
	"os"
)

// licenses is what the licences of the linked modules want shown beside the
// binary; inside it, it goes wherever that goes. Written by hack/licences.py.
//
//go:embed licenses.txt
var licenses string

func runLicenses(_ context.Context, args []string) error {
	f := flags("licenses", "", "Print the licences of the software that this command contains.", "")
	if err := parse(f, args, 0, 0); err != nil {
		return err
	}
	_, err := os.Stdout.WriteString(licenses)
	return err
}
