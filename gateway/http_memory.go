// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"encoding/json"
	"io"
	"net/http"
)

// sharedMemory is systemsharedmemory[/region/NAME]/status|register|unregister,
// and the same for CUDA, of which there is nothing here.
func (d httpDoor) sharedMemory(w http.ResponseWriter, r *http.Request, who *caller, path []string) error {
	kind, path := path[0], path[1:]
	name := ""
	if len(path) == 3 && path[0] == "region" {
		name, path = path[1], path[2:]
	}
	if len(path) != 1 {
		return errNoPath
	}
	allowed := map[string]string{"status": toRead, "register": toChange, "unregister": toChange}[path[0]]
	if allowed == "" {
		return errNoPath
	}
	if err := checkMethod(r, allowed); err != nil {
		return err
	}
	if kind == "cudasharedmemory" {
		switch path[0] {
		case "status":
			writeJSON(w, []byte("[]"))
			return nil
		case "unregister":
			return nil
		case "register":
			return errNoCUDA
		}
		return errNoPath
	}
	switch path[0] {
	case "status":
		list, err := d.g.regions.status(who, name)
		if err != nil {
			return err
		}
		b := []byte{'['}
		for i, k := range list {
			if i > 0 {
				b = append(b, ',')
			}
			b = appendMessage(b, k.message())
		}
		writeJSON(w, append(b, ']'))
		return nil
	case "register":
		var ask struct {
			Key    string `json:"key"`
			Offset uint64 `json:"offset"`
			Size   uint64 `json:"byte_size"`
		}
		body, err := io.ReadAll(r.Body)
		if isTimeout(err) {
			return errSlowBody
		}
		if err == nil {
			err = json.Unmarshal(body, &ask)
		}
		if err != nil {
			return badRequest("register a region: %v", err)
		}
		return d.g.regions.register(who, name, ask.Key, ask.Offset, ask.Size)
	case "unregister":
		return d.g.regions.unregister(who, name)
	}
	return errNoPath
}
