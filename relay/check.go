// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	rpcstatus "google.golang.org/grpc/status"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/tensor"
)

// checkHost checks a host for as long as its connection lives: first that its model
// is the other hosts', then whether it answers.
func (r *relay) checkHost(ctx context.Context, h *host) {
	known := false
	for ctx.Err() == nil {
		began := time.Now()
		err := r.checkOnce(ctx, h, &known)
		if rpcstatus.Code(err) == codes.DeadlineExceeded && time.Since(began) > r.cfg.CheckTimeout+mostLate {
			err = r.checkOnce(ctx, h, &known) // this process or machine did not run
		}
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			h.markUsable()
		default:
			code := rpcstatus.Code(err)
			h.markUnusable(problem(err), code == codes.DeadlineExceeded)
			known = known && code == codes.DeadlineExceeded
		}
		select {
		case <-ctx.Done():
		case <-time.After(r.cfg.CheckInterval):
		}
	}
}

// mostLate is how late a timed-out check returns at most if the relay can run. A
// relay that stood still may have missed the answer, and checks again before it
// leaves every host at once.
const mostLate = 50 * time.Millisecond

func (r *relay) checkOnce(ctx context.Context, h *host, known *bool) error {
	ctx, cancel := context.WithTimeout((&route{host: h}).to(ctx), r.cfg.CheckTimeout)
	defer cancel()
	if !*known {
		if err := r.checkModel(ctx, h); err != nil {
			return err
		}
		*known = true
	}
	rep, err := r.service.ModelReady(ctx, &oip.ModelReadyRequest{Name: r.cfg.Remote})
	if err == nil && !rep.Ready {
		err = fmt.Errorf("model %q is not ready there", r.cfg.Remote)
	}
	if err == nil && h.isPlain() {
		err = r.checkRows(ctx, h)
	}
	return err
}

// checkRows asks another server for its max_batch_size, which changes when the model
// is loaded again. A gateway takes any number of rows.
func (r *relay) checkRows(ctx context.Context, h *host) error {
	most, err := r.rowsThere(ctx)
	if err != nil {
		return err
	}
	h.hosts.mu.Lock()
	defer h.hosts.mu.Unlock()
	if h.maxBatch != most {
		r.log.Info("the host takes another number of rows", "host", h.name, "max_batch_size", most, "before", h.maxBatch)
		h.maxBatch = most
	}
	return nil
}

func (r *relay) rowsThere(ctx context.Context) (int, error) {
	config, err := r.service.ModelConfig(ctx, &oip.ModelConfigRequest{Name: r.cfg.Remote})
	if err != nil {
		return 0, err
	}
	most := int(config.GetConfig().GetMaxBatchSize())
	if most < 1 {
		return 0, fmt.Errorf("model %q takes no batches there (max_batch_size is 0): set it in its configuration", r.cfg.Remote)
	}
	return most, nil
}

func (h *host) isPlain() bool {
	h.hosts.mu.Lock()
	defer h.hosts.mu.Unlock()
	return h.plain
}

// checkModel asks the host for its signature. The first answer becomes the
// signature of the relay.
func (r *relay) checkModel(ctx context.Context, h *host) error {
	server, err := r.service.ServerMetadata(ctx, &oip.ServerMetadataRequest{})
	if err != nil {
		return err
	}
	var header metadata.MD
	meta, err := r.service.ModelMetadata(ctx, &oip.ModelMetadataRequest{Name: r.cfg.Remote}, grpc.Header(&header))
	if err != nil {
		return err
	}
	most, err := r.rowsThere(ctx)
	if err != nil {
		return err
	}
	sig, err := r.signatureOf(meta, header)
	if err != nil {
		return err
	}
	plain := !slices.Contains(server.Extensions, oip.RequestsParameter)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.sig == nil {
		r.sig, r.maxBatch = sig, most
		close(r.known)
	} else if !r.sig.Equal(sig) {
		return fmt.Errorf("it serves %q as %s, this relay as %s, as the first host told: it is left out until they agree, or the relay "+
			"is started again", r.cfg.Remote, sig, r.sig)
	}
	h.hosts.mu.Lock()
	defer h.hosts.mu.Unlock()
	if plain && !h.plain && strings.EqualFold(server.Name, "ringbatch") {
		r.log.Warn("an older ringbatch: a request that fails there fails with its whole batch", "host", h.name, "version", server.Version)
	}
	h.plain, h.maxBatch = plain, most
	return nil
}

func (r *relay) signatureOf(meta *oip.ModelMetadataResponse, header metadata.MD) (*tensor.Signature, error) {
	if text := header.Get(oip.SignatureHeader); len(text) > 0 {
		inputs, outputs, ok := strings.Cut(text[0], " -> ")
		if strings.Contains(outputs, " state ") {
			return nil, fmt.Errorf("it serves %q with state, which a relay cannot keep; use the gateway's sequences", r.cfg.Remote)
		}
		if sig, err := tensor.ParseSignature(strings.Fields(inputs), strings.Fields(outputs)); ok && err == nil {
			return &sig, r.agrees(&sig)
		}
	}
	var sig tensor.Signature
	for _, side := range []struct {
		from  []*oip.ModelMetadataResponse_TensorMetadata
		to    *[]tensor.Spec
		given []tensor.Spec
		flag  string
	}{{meta.Inputs, &sig.Inputs, r.cfg.Inputs, "--input"}, {meta.Outputs, &sig.Outputs, r.cfg.Outputs, "--output"}} {
		for _, t := range side.from {
			spec, err := specOf(t, side.given, side.flag)
			if err != nil {
				return nil, err
			}
			*side.to = append(*side.to, spec)
		}
	}
	if err := sig.Validate(); err != nil {
		return nil, fmt.Errorf("its signature is none of a ring: %w", err)
	}
	return &sig, r.agrees(&sig)
}

// agrees compares the signature with the user's --input and --output.
func (r *relay) agrees(sig *tensor.Signature) error {
	for _, side := range []struct {
		flag        string
		said, there []tensor.Spec
	}{{"--input", r.cfg.Inputs, sig.Inputs}, {"--output", r.cfg.Outputs, sig.Outputs}} {
		for i := range side.said {
			said := side.said[i].String()
			if !slices.ContainsFunc(side.there, func(t tensor.Spec) bool { return t.String() == said }) {
				return fmt.Errorf("it serves %s, %s says %s: correct that, or leave it out where the far side tells all sizes", sig,
					side.flag, said)
			}
		}
	}
	return nil
}

// specOf reads a tensor's metadata. The user has to give the sizes that the far side
// leaves open.
func specOf(t *oip.ModelMetadataResponse_TensorMetadata, given []tensor.Spec, flag string) (spec tensor.Spec, err error) {
	d, err := oip.ParseType(t.Datatype)
	if err != nil {
		return spec, fmt.Errorf("tensor %q is of type %s, which a ring has none of", t.Name, t.Datatype)
	}
	if len(t.Shape) == 0 || t.Shape[0] != -1 {
		return spec, fmt.Errorf("tensor %q has shape %v: the first dimension is to be the batch", t.Name, t.Shape)
	}
	for i := range given {
		if given[i].Name == t.Name {
			if !fits(&given[i], d, t.Shape[1:]) {
				return spec, fmt.Errorf("tensor %q is %s%v there, %s says %s", t.Name, t.Datatype, t.Shape, flag, given[i].String())
			}
			return given[i], nil
		}
	}
	spec = tensor.Spec{Name: t.Name, DType: d}
	if d == tensor.Str {
		return spec, fmt.Errorf("tensor %q is text: say how many bytes it can have, with %s '%s:str[<=N]', behind %v if it has several", t.Name,
			flag, t.Name, t.Shape[1:])
	}
	for _, n := range t.Shape[1:] {
		if n < 1 {
			return spec, fmt.Errorf("tensor %q has shape %v: say how large it can be, with %s '%s:%s[<=N,…]'", t.Name, t.Shape, flag,
				t.Name, d)
		}
		spec.Shape = append(spec.Shape, int(n))
	}
	return spec, nil
}

// fits reports whether the user's shape only fills in dimensions that the far side
// leaves open.
func fits(given *tensor.Spec, d tensor.DType, shape []int64) bool {
	row := oip.WireRow(given, given.Shape)
	if given.DType != d || len(row) != len(shape) {
		return false
	}
	for i, n := range shape {
		if n >= 1 && (row[i] != int(n) || slices.Contains(given.Variable, i)) {
			return false
		}
	}
	return true
}

// problem explains a failed check in one sentence.
func problem(err error) string {
	s, ok := rpcstatus.FromError(err)
	if !ok {
		return err.Error()
	}
	switch s.Code() {
	case codes.DeadlineExceeded:
		return "it does not answer"
	case codes.NotFound:
		return "it does not serve the model: " + s.Message()
	case codes.Unauthenticated, codes.PermissionDenied:
		return "it refuses us: " + s.Message() + "; see --token-file and --tls-cert"
	case codes.Unimplemented:
		return "it does not speak the Open Inference Protocol: " + s.Message()
	case codes.Unavailable:
		return connectionProblem(errors.New(s.Message()))
	}
	return s.Message()
}

const brokenPipe = "broken pipe" // the kernel's words for a write after the host hung up

const (
	noGRPC = "it does not answer gRPC: is that the gRPC port, or a balancer that does not pass HTTP/2 on?"
	hungUp = "it hung up as gRPC began: is that the gRPC port, and does it want TLS?"
)

// connectionProblem explains a failed connection in one sentence.
func connectionProblem(err error) string {
	text := err.Error()
	for _, known := range []struct{ has, say string }{
		{"no such host", "there is no such host"},
		{"connection refused", "nothing listens there"},
		{"HTTP/1", "it answers HTTP/1, not gRPC: is that the gRPC port, or a balancer that does not pass HTTP/2 on?"},
		{"malformed HTTP", noGRPC},
		{"frame too large", noGRPC},
		{"certificate has expired", "its certificate has expired, or the clocks differ"},
		{"certificate signed by unknown authority", "its certificate is of an authority that we don't know: give it with --tls-ca"},
		{"certificate is valid for", "its certificate is for another name: see --server-name"},
		{"cannot validate certificate for", "its certificate does not name this address: see --server-name"},
		{"first record does not look like a TLS handshake", "it does not speak TLS"},
		{"certificate required", "it wants a certificate of ours: give --tls-cert and --tls-key"},
		{"expired certificate", "our certificate has expired: replace the file of --tls-cert"},
		{"bad certificate", "it does not take our certificate"},
		// we hung up
		{"use of closed network connection", "it takes connections and says nothing: is that the gRPC port, and does it want TLS?"},
		{brokenPipe, hungUp},
		{"error reading server preface", hungUp},
	} {
		if strings.Contains(text, known.has) {
			return known.say + " (" + strings.TrimPrefix(text, "connection error: desc = ") + ")"
		}
	}
	return text
}
