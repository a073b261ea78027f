// SPDX-License-Identifier: Apache-2.0

package core

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"runtime/debug"
	"strings"

	"google.golang.org/grpc/codes"
	rpcstatus "google.golang.org/grpc/status"

	"github.com/ringbatch/ringbatch/status"
)

// Meaning is an error's status in both protocols.
type Meaning struct {
	HTTP int
	GRPC codes.Code
}

// meanings of the named errors. A test fails for an error without a meaning.
var meanings = invert(map[Meaning][]status.Code{
	{http.StatusBadRequest, codes.InvalidArgument}: {status.ErrInvalid, status.ErrDType, status.ErrShape, status.ErrRows, status.ErrSize,
		status.ErrOutputTooSmall, status.ErrNoLevel},
	{http.StatusNotFound, codes.NotFound}:                     {status.ErrUnknownModel},
	{http.StatusRequestEntityTooLarge, codes.InvalidArgument}: {status.ErrTooLarge},
	{http.StatusTooManyRequests, codes.ResourceExhausted}: {status.ErrQueueFull, status.ErrOverloaded, status.ErrRingFull,
		status.ErrFull},
	{http.StatusConflict, codes.Aborted}: {status.ErrStateLost, status.ErrRestarted}, // the caller begins the sequence, or the stream, again
	{499, codes.Canceled}:                {status.ErrCanceled},                       // the caller has gone
	{http.StatusInternalServerError, codes.Internal}: {status.ErrFailed, status.ErrBrokerRunning, status.ErrReleased,
		status.ErrCommitted, status.ErrNotCommitted, status.ErrNotDone, status.ErrForked,
		status.ErrWorkerDied, status.ErrWorkerHung}, // a retry might kill more workers
	{http.StatusServiceUnavailable, codes.Unavailable}: {status.ErrDraining, status.ErrBrokerGone, status.ErrNoWorker,
		status.ErrNoBroker, status.ErrVersion, status.ErrLayout, status.ErrSignatureMismatch, status.ErrProtocol,
		status.ErrTooManyConnections, status.ErrNoDescriptors, status.ErrNamespace, status.ErrClosed, status.ErrNoGPU,
		status.ErrWrongGPU, status.ErrBusy,
		status.ErrForbidden}, // the gateway's fault, not the caller's
	{http.StatusServiceUnavailable, codes.ResourceExhausted}: {status.ErrNoMemory, status.ErrQuota},
	{http.StatusGatewayTimeout, codes.DeadlineExceeded}:      {status.ErrExpired, status.ErrQueueTimeout, status.ErrTimeout},
})

func invert(byMeaning map[Meaning][]status.Code) map[status.Code]Meaning {
	all := map[status.Code]Meaning{}
	for m, list := range byMeaning {
		for _, code := range list {
			all[code] = m
		}
	}
	return all
}

// Refusal is an error of the gateway itself.
type Refusal struct {
	Meaning
	text  string
	Allow string      // HTTP: the allowed methods
	code  status.Code // names it for relays; 0: Refused
}

func (r *Refusal) Error() string { return r.text }

// GRPCStatus gives grpc-go the status of an error that guard has set.
func (r *Refusal) GRPCStatus() *rpcstatus.Status { return rpcstatus.New(r.GRPC, r.text) }

func Refuse(http int, grpc codes.Code, format string, args ...any) error {
	return &Refusal{Meaning: Meaning{http, grpc}, text: fmt.Sprintf(format, args...)}
}

// NotAllowed refuses a method of HTTP, and names the allowed ones.
func NotAllowed(text, allow string) error {
	return &Refusal{Meaning: Meaning{http.StatusMethodNotAllowed, codes.Unimplemented}, text: text, Allow: allow}
}

func BadRequest(format string, args ...any) error {
	return Refuse(http.StatusBadRequest, codes.InvalidArgument, format, args...)
}

// MeaningOf finds an error's status in both protocols.
func MeaningOf(err error) Meaning {
	var r *Refusal
	if errors.As(err, &r) {
		return r.Meaning
	}
	var code status.Code
	if errors.As(err, &code) {
		if m, ok := meanings[code]; ok {
			return m
		}
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return meanings[status.ErrExpired]
	case errors.Is(err, context.Canceled):
		return meanings[status.ErrCanceled]
	}
	return Meaning{http.StatusInternalServerError, codes.Internal}
}

// NameOf returns the name of an error for oip.NotRunTrailer.
func NameOf(err error) string {
	var r *Refusal
	var code status.Code
	if errors.As(err, &r) {
		code = r.code
	} else {
		errors.As(err, &code)
	}
	if code == 0 {
		return "Refused"
	}
	return code.Name()
}

// TextOf returns the text of an error for both protocols.
func TextOf(err error) string {
	text := err.Error()
	var code status.Code
	switch {
	case errors.As(err, &code):
	case errors.Is(err, context.DeadlineExceeded):
		text = status.ErrExpired.Error()
	case errors.Is(err, context.Canceled):
		text = status.ErrCanceled.Error()
	}
	if code == status.ErrNoBroker || code == status.ErrTimeout { // the path of the socket is of no use on other hosts
		text = code.Error()
	}
	// The lines after the first of a model's text, such as a Python traceback, name
	// files of this host.
	text, _, _ = strings.Cut(strings.TrimSpace(text), "\n")
	if len(text) > maxTextBytes {
		text = text[:maxTextBytes] + "…"
	}
	return strings.ToValidUTF8(text, "?")
}

var (
	ErrSlowBody = Refuse(http.StatusRequestTimeout, codes.DeadlineExceeded, "the request comes too slowly: less than %d KiB a second",
		leastRate>>10)
	ErrFault    = Refuse(http.StatusInternalServerError, codes.Internal, "a fault in the gateway; its log says more")
	ErrDraining = error(&Refusal{Meaning: Meaning{http.StatusServiceUnavailable, codes.Unavailable}, code: status.ErrDraining,
		text: "the gateway is shutting down"})
)

// LogFault logs a panic that ended one request.
func (g *Gateway) LogFault(fault any) {
	g.Log.Error("a fault in the gateway ended one request", "fault", fault, "stack", string(debug.Stack()))
}

func IsTimeout(err error) bool {
	var t interface{ Timeout() bool }
	return errors.As(err, &t) && t.Timeout()
}

var (
	errNoParameters = Refuse(http.StatusBadRequest, codes.InvalidArgument,
		"a model is loaded as the broker's configuration declares it; give no parameters")
	errNoUnloading = Refuse(http.StatusForbidden, codes.PermissionDenied,
		"callers of a gateway with tokens or certificates cannot unload models; use ringbatch sleep on its host")
	ErrNoCUDA = Refuse(http.StatusBadRequest, codes.Unimplemented,
		"CUDA shared memory is not supported by the gateway; use system shared memory, which workers read straight into the GPU, or "+
			"connect to the broker itself: a model with memory = \"device:0\" takes tensors that are on the GPU")
)
