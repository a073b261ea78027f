// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"net"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/broker/configfile"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

func TestTheFileForKServeIsTakenAndAGatewayThatWouldNotStartIsNot(t *testing.T) {
	cfg, err := configfile.Load("../../deploy/kserve/ringbatch.toml")
	must.Do(t, err)
	must.Check(t, checkGateway(cfg.Workers))
	for text, want := range map[string]error{
		"[gateway]\n": nil,
		"[gateway]\nhttp = 8000\ndrain_delay = \"1s\"\n": nil,
		"[gateway]\nhttpp = 8000\n":                      errUsage,
		"[gateway]\nhttp = \"0.0.0.0:8000\"\n":           status.ErrInvalid,
		"[gateway]\ntls_cert = \"/there/is/none.pem\"\n": status.ErrInvalid,
	} {
		cfg, err := configfile.Parse(text)
		if err == nil {
			err = checkGateway(cfg.Workers)
		}
		if !errors.Is(err, want) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestABrokerIsNotStartedWhereAnotherProcessHasThePortOfItsGateway(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must.Do(t, err)
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	cfg, err := configfile.Parse("[gateway]\nhttp = \"off\"\ngrpc = " + port + "\n")
	must.Do(t, err)
	if err := checkGatewayPorts(cfg.Workers); err == nil || !strings.Contains(err.Error(), "choose another with --grpc PORT") {
		t.Error(err)
	}
}

func TestTheExampleThatAGatewayPrintsIsShortOrNotThere(t *testing.T) {
	for inputs, want := range map[string]string{
		"x:f32[2]":         `{"inputs":[{"name":"x","datatype":"FP32","shape":[1,2],"data":[0,0]}]}`,
		"b:bool[<=9]":      `{"inputs":[{"name":"b","datatype":"BOOL","shape":[1,1],"data":[false]}]}`,
		"y:i8[]":           `{"inputs":[{"name":"y","datatype":"INT8","shape":[1],"data":[0]}]}`,
		"x:f32[3,224,224]": "",
	} {
		sig, err := tensor.ParseSignature([]string{inputs}, []string{"y:f32[1]"})
		if inputs == "y:i8[]" {
			sig, err = tensor.ParseSignature([]string{inputs}, []string{"z:f32[1]"})
		}
		must.Do(t, err)
		if got := example(&sig); got != want {
			t.Errorf("%s: %s", inputs, got)
		}
	}
}

func TestARelaysZerosAreRefused(t *testing.T) {
	for _, flag := range []string{"--in-flight=0", "--attempts=0", "--check-interval=0", "--check-timeout=0s"} {
		err := runRelay(t.Context(), []string{"model", "--to", "127.0.0.1:8001", flag})
		if name, _, _ := strings.Cut(flag, "="); !errors.Is(err, errUsage) || !strings.Contains(err.Error(), name+" must be more than 0") {
			t.Errorf("%s: %v", flag, err)
		}
	}
}
