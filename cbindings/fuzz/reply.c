/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as a broker's reply to an attachment. */
#include "../src/attach.c"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	if (size < 1)
		return 0;
	bool worker = data[0] & 1;
	rb_frame f = {.body = malloc(size), .bytes = (uint32_t)size - 1};
	rb_session s = {.socket = -1, .doorbell = -1};
	rb_reply p;
	memcpy(f.body, data + 1, size - 1);
	s.layout.tensor = calloc(RB_GO_MAX_TENSORS, sizeof(rb_tensor));
	if (!rb_read_reply(&f, &p) && p.attached && !check_reply(&p, &s, worker)) {
		/* An accepted reply fits together: the last byte of each tensor is inside. */
		uint64_t ends[2] = {RB_GO_SEGMENT_HEADER, 0}; /* on the host, on the device */
		for (uint32_t k = 0; k < s.layout.inputs + s.layout.outputs; k++) {
			const rb_tensor *t = &s.layout.tensor[k];
			uint64_t *end = &ends[t->on_device > 0], room = t->on_device ? s.layout.device_size : s.layout.planes_size;
			if ((t->offset < *end && !p.planes.at) || t->offset + t->stride * s.layout.slots > room)
				__builtin_trap();
			*end = t->offset + t->stride * s.layout.slots;
		}
		if (!worker && s.first_slot + s.window > s.layout.slots)
			__builtin_trap();
	}
	rb_session_close(&s);
	free(f.body);
	return 0;
}
