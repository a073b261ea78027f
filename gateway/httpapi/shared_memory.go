// SPDX-License-Identifier: Apache-2.0

package httpapi

import (
	"encoding/json"
	"io"
	"net/http"

	"github.com/ringbatch/ringbatch/gateway/core"
)

// sharedMemory answers systemsharedmemory[/region/NAME]/status|register|unregister,
// and the same for CUDA, which the gateway does not have.
func (d httpDoor) sharedMemory(w http.ResponseWriter, r *http.Request, who *core.Caller, path []string) error {
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
	switch kind + "/" + path[0] {
	case "cudasharedmemory/status":
		writeJSON(w, []byte("[]"))
	case "cudasharedmemory/register":
		return core.ErrNoCUDA
	case "systemsharedmemory/status":
		list, err := d.g.Regions.Status(who, name)
		if err != nil {
			return err
		}
		b := []byte{'['}
		for i, k := range list {
			if i > 0 {
				b = append(b, ',')
			}
			b = appendMessage(b, k.Message())
		}
		writeJSON(w, append(b, ']'))
	case "systemsharedmemory/register":
		var ask struct {
			Key    string `json:"key"`
			Offset uint64 `json:"offset"`
			Size   uint64 `json:"byte_size"`
		}
		body, err := io.ReadAll(r.Body)
		if core.IsTimeout(err) {
			return core.ErrSlowBody
		}
		if err == nil {
			err = json.Unmarshal(body, &ask)
		}
		if err != nil {
			return core.BadRequest("register a region: %v", err)
		}
		return d.g.Regions.Register(who, name, ask.Key, ask.Offset, ask.Size)
	case "systemsharedmemory/unregister":
		return d.g.Regions.Unregister(who, name)
	}
	return nil
}
