// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"testing"
)

func TestTheStatusesOfEveryLanguageAreThoseOfTheTable(t *testing.T) {
	root, err := moduleRoot()
	if err != nil {
		t.Fatal(err)
	}
	err = generate(root, func(path string, _ []byte, _ os.FileMode) error {
		t.Errorf("%s is not up to date: run  go generate ./status", path)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
