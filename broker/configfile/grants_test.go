// SPDX-License-Identifier: Apache-2.0

package configfile_test

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/broker/configfile"
	"github.com/ringbatch/ringbatch/status"
)

func TestUsersAndGroupsAreAllowedByNameOrNumber(t *testing.T) {
	cfg, err := configfile.Parse(`
		allow_uids = [7]
		user_share = 50
		max_process_clients = 10
		max_user_models = 3
		max_user_slots = 100
		max_user_bytes = 1000
		[[allow]]
		users = ["root", 1001]
		may = ["infer"]
		[[allow]]
		groups = [12]
		may = ["serve", "administer"]
	`)
	want := []broker.Grant{{UIDs: []int{0, 1001}, May: broker.MayInfer}, {GIDs: []int{12}, May: broker.MayServe | broker.MayAdminister}}
	limits := broker.Limits{UserShare: 50, MaxProcessClients: 10, MaxUserModels: 3, MaxUserSlots: 100, MaxUserBytes: 1000}
	if err != nil || !reflect.DeepEqual(cfg.Grants, want) || cfg.Limits != limits || len(cfg.AllowedUIDs) != 1 {
		t.Errorf("%+v, %+v, %v", cfg.Grants, cfg.Limits, err)
	}
	for text, want := range map[string]broker.Grant{
		"1001":               {UIDs: []int{1001}, May: broker.MayInfer},
		"root=infer,serve":   {UIDs: []int{0}, May: broker.MayInfer | broker.MayServe},
		"@12=administer":     {GIDs: []int{12}, May: broker.MayAdminister},
		"@root=serve, infer": {GIDs: []int{0}, May: broker.MayInfer | broker.MayServe},
	} {
		if g, err := configfile.ParseGrant(text); err != nil || !reflect.DeepEqual(g, want) {
			t.Errorf("%s: %+v, %v", text, g, err)
		}
	}
	for text, says := range map[string]string{
		"nobody-has-this-name": "nobody-has-this-name", "1001=": "unknown permission", "-1": `user "-1"`, "@=infer": "group",
		"1001=rule": "there are infer, serve, administer",
	} {
		if _, err := configfile.ParseGrant(text); !errors.Is(err, status.ErrInvalid) || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", text, err)
		}
	}
	for _, text := range []string{"may = ['infer']", "users = [1]", "users = [1]\nmay = []", "users = [1]\nmay = ['infer']\nwho = 1"} {
		if _, err := configfile.Parse("[[allow]]\n" + text); !errors.Is(err, status.ErrInvalid) {
			t.Errorf("%q: %v", text, err)
		}
	}
}
