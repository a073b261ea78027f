package main

// #include "internal.h"
// #include "express.h"
import "C"

import (
	"errors"
	"sync/atomic"
	"unsafe"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// The build fails if the two descriptions of the same memory drift apart.
const (
	_ = uint(C.sizeof_rb_express - unsafe.Sizeof(shm.Express{}))
	_ = uint(unsafe.Sizeof(shm.Express{}) - C.sizeof_rb_express)
	_ = uint(C.RB_EXPRESS_LENT_AT - unsafe.Offsetof(shm.Express{}.Lent))
	_ = uint(unsafe.Offsetof(shm.Express{}.Lent) - C.RB_EXPRESS_LENT_AT)
	_ = uint(C.RB_EXPRESS_DOORBELL_AT - unsafe.Offsetof(shm.Express{}.Doorbell))
	_ = uint(unsafe.Offsetof(shm.Express{}.Doorbell) - C.RB_EXPRESS_DOORBELL_AT)
	_ = uint(C.RB_EXPRESS_IN_AT - unsafe.Offsetof(shm.Express{}.In))
	_ = uint(unsafe.Offsetof(shm.Express{}.In) - C.RB_EXPRESS_IN_AT)
	_ = uint(C.RB_EXPRESS_TENSORS - shm.ExpressTensors)
	_ = uint(shm.ExpressTensors - C.RB_EXPRESS_TENSORS)
)

// expressClients are the clients whose requests C may send, by the index of
// their handle. They stay listed while they are being closed: a request that
// was on its way then is still adopted.
var expressClients [C.RB_EXPRESS_CLIENTS]atomic.Pointer[clientHandle]

// express is the place for a handle; nil if it has none.
func express(id uint64) *shm.Express {
	return (*shm.Express)(unsafe.Pointer(C.rb_express_of(C.rb_client(id))))
}

// openExpress lets C in.
func (h *clientHandle) openExpress(id uint64) {
	if x := express(id); x != nil {
		expressClients[uint32(id)].Store(h)
		x.Owner.Store(id)
	}
}

// closeExpress comes after the client was closed: nobody is inside any more.
func closeExpress(id uint64) {
	if x := express(id); x != nil {
		x.Owner.Store(0)
		expressClients[uint32(id)].Store(nil)
	}
}

//export rbgo_express_adopt
func rbgo_express_adopt(id C.uint64_t, outputs *unsafe.Pointer, out *C.uint64_t, msg *C.char) C.int {
	h := expressClients[uint32(id)].Load()
	h.inside.Add(1) // before Adopt lets a closing go on
	defer h.leave()
	r := h.Adopt()
	if errors.Is(r.Poll(), status.ErrNotDone) {
		*out = C.uint64_t(r.ID())
		return result(status.ErrTimeout, msg)
	}
	*out = 0
	return result(h.collect(r, outputs), msg)
}

//export rbgo_express_back
func rbgo_express_back(id C.uint64_t) {
	if h := expressClients[uint32(id)].Load(); h != nil {
		h.TakeBack()
	}
}
