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

// A test fails for a named error without a meaning.
var meanings = map[status.Code]Meaning{
	// A request's end.
	status.ErrFailed:       {http.StatusInternalServerError, codes.Internal},
	status.ErrExpired:      {http.StatusGatewayTimeout, codes.DeadlineExceeded},
	status.ErrCanceled:     {499, codes.Canceled}, // the caller has gone
	status.ErrQueueFull:    {http.StatusTooManyRequests, codes.ResourceExhausted},
	status.ErrQueueTimeout: {http.StatusGatewayTimeout, codes.DeadlineExceeded},
	status.ErrTooLarge:     {http.StatusRequestEntityTooLarge, codes.InvalidArgument},
	status.ErrWorkerDied:   {http.StatusInternalServerError, codes.Internal}, // a retry might kill more workers
	status.ErrWorkerHung:   {http.StatusInternalServerError, codes.Internal},
	status.ErrDraining:     {http.StatusServiceUnavailable, codes.Unavailable},
	status.ErrBrokerGone:   {http.StatusServiceUnavailable, codes.Unavailable},
	status.ErrNoWorker:     {http.StatusServiceUnavailable, codes.Unavailable},
	status.ErrOverloaded:   {http.StatusTooManyRequests, codes.ResourceExhausted},

	// Connecting.
	status.ErrNoBroker:           {http.StatusServiceUnavailable, codes.Unavailable},
	status.ErrUnknownModel:       {http.StatusNotFound, codes.NotFound},
	status.ErrVersion:            {http.StatusServiceUnavailable, codes.Unavailable},
	status.ErrLayout:             {http.StatusServiceUnavailable, codes.Unavailable},
	status.ErrForbidden:          {http.StatusServiceUnavailable, codes.Unavailable}, // the gateway's fault, not the caller's
	status.ErrNoMemory:           {http.StatusServiceUnavailable, codes.ResourceExhausted},
	status.ErrSignatureMismatch:  {http.StatusServiceUnavailable, codes.Unavailable},
	status.ErrRingFull:           {http.StatusTooManyRequests, codes.ResourceExhausted},
	status.ErrBrokerRunning:      {http.StatusInternalServerError, codes.Internal},
	status.ErrProtocol:           {http.StatusServiceUnavailable, codes.Unavailable},
	status.ErrTooManyConnections: {http.StatusServiceUnavailable, codes.Unavailable},
	status.ErrNoDescriptors:      {http.StatusServiceUnavailable, codes.Unavailable},
	status.ErrQuota:              {http.StatusServiceUnavailable, codes.ResourceExhausted},
	status.ErrNamespace:          {http.StatusServiceUnavailable, codes.Unavailable},

	// Using.
	status.ErrInvalid:        {http.StatusBadRequest, codes.InvalidArgument},
	status.ErrDType:          {http.StatusBadRequest, codes.InvalidArgument},
	status.ErrShape:          {http.StatusBadRequest, codes.InvalidArgument},
	status.ErrRows:           {http.StatusBadRequest, codes.InvalidArgument},
	status.ErrSize:           {http.StatusBadRequest, codes.InvalidArgument},
	status.ErrOutputTooSmall: {http.StatusBadRequest, codes.InvalidArgument},
	status.ErrFull:           {http.StatusTooManyRequests, codes.ResourceExhausted},
	status.ErrClosed:         {http.StatusServiceUnavailable, codes.Unavailable},
	status.ErrReleased:       {http.StatusInternalServerError, codes.Internal},
	status.ErrCommitted:      {http.StatusInternalServerError, codes.Internal},
	status.ErrNotCommitted:   {http.StatusInternalServerError, codes.Internal},
	status.ErrNotDone:        {http.StatusInternalServerError, codes.Internal},
	status.ErrNoLevel:        {http.StatusBadRequest, codes.InvalidArgument},
	status.ErrTimeout:        {http.StatusGatewayTimeout, codes.DeadlineExceeded},
	status.ErrForked:         {http.StatusInternalServerError, codes.Internal},
	status.ErrNoGPU:          {http.StatusServiceUnavailable, codes.Unavailable},
	status.ErrWrongGPU:       {http.StatusServiceUnavailable, codes.Unavailable},
}

// Refusal is an error of the gateway itself.
type Refusal struct {
	Meaning
	text  string
	Allow string // HTTP: the allowed methods
}

func (r *Refusal) Error() string { return r.text }

// GRPCStatus gives grpc-go the status.
func (r *Refusal) GRPCStatus() *rpcstatus.Status { return rpcstatus.New(r.GRPC, r.text) }

func Refuse(http int, grpc codes.Code, format string, args ...any) error {
	return &Refusal{Meaning: Meaning{http, grpc}, text: fmt.Sprintf(format, args...)}
}

// NotAllowed refuses a method of HTTP, and names the allowed ones.
func NotAllowed(text, allow string) error {
	return &Refusal{Meaning{http.StatusMethodNotAllowed, codes.Unimplemented}, text, allow}
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
	if len(text) > MaxTextBytes {
		text = text[:MaxTextBytes] + "…"
	}
	return strings.ToValidUTF8(text, "?")
}

var (
	ErrSlowBody = Refuse(http.StatusRequestTimeout, codes.DeadlineExceeded, "the request comes too slowly: less than %d KiB a second",
		LeastRate>>10)
	ErrFault    = Refuse(http.StatusInternalServerError, codes.Internal, "a fault in the gateway; its log says more")
	ErrDraining = Refuse(http.StatusServiceUnavailable, codes.Unavailable, "the gateway is shutting down")
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
	ErrNoLoading = Refuse(http.StatusBadRequest, codes.Unimplemented,
		"models come and go with their workers; the gateway neither loads nor unloads them")
	ErrNoCUDA = Refuse(http.StatusBadRequest, codes.Unimplemented,
		"CUDA shared memory is not supported by the gateway; use system shared memory, which workers read straight into the GPU, or "+
			"connect to the broker itself: a model with memory = \"device:0\" takes tensors that are on the GPU")
)
