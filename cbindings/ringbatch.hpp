// SPDX-License-Identifier: Apache-2.0
// ringbatch.hpp: clients and workers in C++17, over ringbatch.h, whose rules hold here, too.
//
//   auto c = ringbatch::client::connect("net");
//   if (!c) return fail(c.text());             // or c.value(), which throws, or ends a program without exceptions
//   std::vector<float> x(4), y(2);
//   ringbatch::status s = c->infer(1, {x}, {y});
//
// Handles close themselves. Functions return a status or a result, and throw nothing: -fno-exceptions works. The elements'
// type and the bytes of the caller's memory are compared with the model's.
#ifndef RINGBATCH_HPP
#define RINGBATCH_HPP

#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "ringbatch.h"

namespace ringbatch {

// A status of ringbatch.h, with the text of its error.
class [[nodiscard]] status {
public:
	status() = default;
	status(int code) : code_(code), text_(code == RB_OK ? "" : rb_error()) {}
	status(int code, std::string text) : code_(code), text_(rb_status_text(code) + (": " + std::move(text))) {}
	explicit operator bool() const { return code_ == RB_OK; }
	int code() const { return code_; }
	const std::string &text() const { return text_; }

private:
	int code_ = RB_OK;
	std::string text_;
};

struct error : std::runtime_error {
	explicit error(const status &s) : std::runtime_error(s.text()), code(s.code()) {}
	int code;
};

[[noreturn]] inline void raise(const status &s)
{
#if defined(__cpp_exceptions)
	throw error(s);
#else
	std::fprintf(stderr, "ringbatch: %s\n", s.text().c_str());
	std::abort();
#endif
}

// A value, or the status of the call that has none.
template <class T> class [[nodiscard]] result {
public:
	result(T value) : value_(std::move(value)) {}
	result(ringbatch::status s) : status_(std::move(s)) {}
	explicit operator bool() const { return bool(status_); }
	const ringbatch::status &status() const { return status_; }
	int code() const { return status_.code(); }
	const std::string &text() const { return status_.text(); }
	T &operator*() { return value_; }
	T *operator->() { return &value_; }
	T &value() { return status_ ? value_ : (raise(status_), value_); }

private:
	T value_{};
	ringbatch::status status_;
};

template <class T> class span {
public:
	span() = default;
	span(T *data, std::size_t size) : data_(data), size_(size) {}
	T *data() const { return data_; }
	std::size_t size() const { return size_; }
	T &operator[](std::size_t i) const { return data_[i]; }
	T *begin() const { return data_; }
	T *end() const { return data_ + size_; }

private:
	T *data_ = nullptr;
	std::size_t size_ = 0;
};

// The element type of a C++ type; 0: none. Floats of 16 and 8 bits have no C++ type: use void views of ringbatch.h.
// A char is a byte of a text, for rb_text_write; int8_t is a number.
template <class T> constexpr uint32_t dtype_of()
{
	using U = std::remove_cv_t<T>;
	if constexpr (std::is_same_v<U, bool>) return RB_BOOL;
	else if constexpr (std::is_same_v<U, float>) return RB_F32;
	else if constexpr (std::is_same_v<U, double>) return RB_F64;
	else if constexpr (std::is_same_v<U, char>) return RB_STR;
	else if constexpr (std::is_integral_v<U> && std::is_signed_v<U>)
		return sizeof(U) == 1 ? RB_I8 : sizeof(U) == 2 ? RB_I16 : sizeof(U) == 4 ? RB_I32 : RB_I64;
	else return std::is_same_v<U, unsigned char> ? RB_U8 : 0;
}

// The caller's memory for one tensor: of a vector, an array or a span.
template <class Void> struct memory {
	template <class C, class T = std::remove_pointer_t<decltype(std::declval<C &>().data())>>
	memory(C &&c) : data(c.data()), bytes(c.size() * sizeof(T)), dtype(dtype_of<T>())
	{
		static_assert(dtype_of<T>() != 0, "no tensor has elements of this type");
	}
	Void *data;
	uint64_t bytes;
	uint32_t dtype;
};
using inputs = std::initializer_list<memory<const void>>;
using outputs = std::initializer_list<memory<void>>;

// The elements of a view, row by row.
template <class T> class rows {
public:
	rows() = default;
	explicit rows(const rb_view &v) : view_(v) {}
	std::size_t size() const { return view_.shape[0]; }
	span<T> operator[](std::size_t i) const
	{
		std::size_t n = 1;
		for (uint32_t k = 1; k < view_.rank; k++)
			n *= view_.shape[k];
		return {reinterpret_cast<T *>(static_cast<char *>(view_.data) + i * view_.stride), n};
	}

private:
	rb_view view_{};
};

namespace detail {
// Gives a handle, a request or a batch back.
template <class T, class Close> class owned {
public:
	owned() = default;
	explicit owned(T value) : value_(value) {}
	owned(owned &&other) noexcept : value_(std::exchange(other.value_, T{})) {}
	owned &operator=(owned &&other) noexcept { return std::swap(value_, other.value_), *this; }
	~owned() { value_ ? Close()(value_) : void(); }

protected:
	T value_{};
};

template <int (*Close)(uint64_t)> struct closes {
	void operator()(uint64_t id) const { Close(id); }
};
struct claimed : rb_request {
	rb_client client;
	explicit operator bool() const { return id != 0; }
};
struct releases {
	void operator()(const claimed &r) const { rb_release(r.client, r.id); }
};
struct drops {
	void operator()(rb_batch *b) const
	{
		rb_batch_fail_all(b, "the worker dropped the batch");
		rb_batch_complete(b);
	}
};

template <class T> result<rows<T>> typed(int code, const rb_view &v)
{
	if (code != RB_OK)
		return status(code);
	if (v.dtype != dtype_of<T>())
		return status(RB_ERR_DTYPE, "the tensor's elements have another type than the view's");
	return rows<T>(v);
}

// Pointers and sizes of one side, with the types checked.
template <class Void> struct side {
	side(rb_client c, int which, std::initializer_list<memory<Void>> given)
	{
		rb_tensor t;
		uint32_t k = 0;
		for (const auto &m : given) {
			if ((checked = rb_client_tensor(c, which, k++, &t)); !checked)
				return;
			if (t.dtype != m.dtype) {
				checked = status(RB_ERR_DTYPE, std::string(t.name) + " has elements of another type");
				return;
			}
			pointers.push_back(m.data);
			bytes.push_back(m.bytes);
		}
		if (rb_model model; (checked = rb_client_model(c, &model)) && k != (which == RB_INPUT ? model.inputs : model.outputs))
			checked = status(RB_ERR_INVALID, "the model has another number of tensors");
	}
	std::vector<Void *> pointers;
	std::vector<uint64_t> bytes;
	status checked;
};
} // namespace detail

// A claimed request. Give it back before its client is closed.
class request : public detail::owned<detail::claimed, detail::releases> {
public:
	using owned::owned;
	template <class T> result<rows<T>> input(uint32_t k)
	{
		rb_view v;
		return detail::typed<T>(rb_input(value_.client, value_.id, k, &v), v);
	}
	template <class T> result<rows<const T>> output(uint32_t k)
	{
		rb_view v;
		return detail::typed<const T>(rb_output(value_.client, value_.id, k, &v), v);
	}
	status commit(int64_t expires = 0, uint32_t flags = 0) { return rb_commit(value_.client, value_.id, expires, flags); }
	status wait(int64_t timeout = -1) { return rb_wait(value_.client, value_.id, timeout); }
	status cancel() { return rb_cancel(value_.client, value_.id); }
	const rb_request &raw() const { return value_; }
};

class client : public detail::owned<rb_client, detail::closes<rb_close>> {
public:
	using owned::owned;
	rb_client id() const { return value_; }
	static result<client> connect(const char *model, rb_connect_options options = {})
	{
		rb_client c;
		options.size = sizeof options;
		if (int code = rb_connect(model, &options, &c))
			return status(code);
		return client(c);
	}
	result<request> claim(uint32_t n, const std::vector<uint32_t> &dims = {}, int64_t timeout = -1)
	{
		detail::claimed r{{}, id()};
		if (int code = rb_claim(id(), n, dims.data(), uint32_t(dims.size()), timeout, &r))
			return status(code);
		return request(r);
	}
	// Runs n rows. RB_ERR_TIMEOUT: the request was released, and canceled if it was under way.
	status infer(uint32_t n, inputs in, outputs out, int64_t expires = 0, int64_t timeout = -1)
	{
		detail::side<const void> from(id(), RB_INPUT, in);
		detail::side<void> to(id(), RB_OUTPUT, out);
		if (!from.checked || !to.checked)
			return from.checked ? to.checked : from.checked;
		uint64_t request = 0;
		status s = rb_infer(id(), n, from.pointers.data(), from.bytes.data(), to.pointers.data(), to.bytes.data(), expires, timeout, &request);
		if (s.code() == RB_ERR_TIMEOUT && request)
			rb_release(id(), request);
		return s;
	}
};

// A batch that a worker has taken. If it is dropped without complete(), its requests fail.
class batch : public detail::owned<rb_batch *, detail::drops> {
public:
	using owned::owned;
	const rb_batch *operator->() const { return value_; }
	template <class T> result<span<T>> row(int side, uint32_t k, uint32_t i)
	{
		rb_tensor t;
		void *data;
		uint64_t bytes;
		if (int code = rb_worker_tensor(value_->worker, side == RB_NEXT_STATE ? int(RB_STATE) : side, k, &t))
			return status(code);
		if (t.dtype != dtype_of<T>())
			return status(RB_ERR_DTYPE, std::string(t.name) + " has elements of another type");
		if (int code = rb_batch_row(value_, side, k, i, &data, &bytes))
			return status(code);
		return span<T>(static_cast<T *>(data), bytes / sizeof(T));
	}
	template <class T> result<span<const T>> input(uint32_t k, uint32_t i) { return row<const T>(RB_INPUT, k, i); }
	template <class T> result<span<T>> output(uint32_t k, uint32_t i) { return row<T>(RB_OUTPUT, k, i); }
	status fail(uint32_t request, const char *text) { return rb_batch_fail(value_, request, text); }
	status complete() { return rb_batch_complete(std::exchange(value_, nullptr)); }
};

class worker : public detail::owned<rb_worker, detail::closes<rb_worker_close>> {
public:
	using owned::owned;
	rb_worker id() const { return value_; }
	static result<worker> attach(const char *model, const char *signature, rb_worker_options options = {})
	{
		rb_worker w;
		options.size = sizeof options;
		if (int code = rb_worker_attach(model, signature, &options, &w))
			return status(code);
		return worker(w);
	}
	result<batch> next(int64_t timeout = -1)
	{
		rb_batch *b;
		if (int code = rb_worker_next(id(), timeout, &b))
			return status(code);
		return batch(b);
	}
};

} // namespace ringbatch
#endif
