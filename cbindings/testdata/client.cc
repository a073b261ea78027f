// SPDX-License-Identifier: Apache-2.0
// A client and a worker over ringbatch.hpp, in one process; built with exceptions and without.
#include <ringbatch.hpp>

#include <array>
#include <cstring>
#include <thread>

using namespace ringbatch;

#define CHECK(cond) ((cond) ? (void)0 : (std::fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #cond, rb_error()), std::exit(1)))

static void serve(worker w, int batches)
{
	while (batches--) {
		auto b = w.next();
		CHECK(b);
		bool drop = false;
		for (uint32_t i = 0; i < (*b)->rows; i++) {
			auto x = b->input<float>(0, i);
			auto y = b->output<double>(0, i);
			CHECK(x && y && b->output<float>(0, i).code() == RB_ERR_DTYPE);
			y.value()[0] = (*x)[0] + (*x)[1];
			drop |= (*x)[0] < 0;
			if ((*x)[0] == 7)
				CHECK(b->fail(0, "seven is refused"));
		}
		if (!drop)
			CHECK(b->complete());
	}
}

int main(int, char **argv)
{
	rb_worker_options o{};
	o.socket = argv[1];
	o.policy = "max_batch_size=2";
	o.run_once = 1;
	auto w = worker::attach("sums", "x:f32[2] -> y:f64[]", o);
	CHECK(w && worker::attach("sums", "x:f32[2]", o).code() == RB_ERR_INVALID);
	std::thread serving(serve, std::move(*w), 4);

	rb_connect_options p{};
	p.socket = argv[1];
	CHECK(client::connect("nothing", p).code() == RB_ERR_UNKNOWN_MODEL);
	client c = std::move(client::connect("sums", p).value());
	std::vector<float> x{1, 2, 3, 4};
	std::array<double, 2> y{};
	CHECK(c.infer(2, {x}, {y}) && y[0] == 3 && y[1] == 7);
	CHECK(c.infer(2, {y}, {y}).code() == RB_ERR_DTYPE && c.infer(1, {x}, {y}).code() == RB_ERR_SIZE);
	CHECK(c.infer(2, {x}, {}).code() == RB_ERR_INVALID);
	for (float first : {7.f, -1.f}) {
		status failed = c.infer(1, {std::vector<float>{first, 0}}, {std::vector<double>(1)});
		CHECK(failed.code() == RB_ERR_FAILED && failed.text().find(first == 7 ? "seven" : "dropped") != std::string::npos);
	}
	{
		auto r = c.claim(2);
		auto in = r->input<float>(0);
		CHECK(in && in->size() == 2 && r->input<double>(0).code() == RB_ERR_DTYPE);
		for (std::size_t i = 0; i < 2; i++)
			for (float &value : (*in)[i])
				value = 2;
		CHECK(r->commit() && r->wait());
		auto out = r->output<double>(0);
		CHECK(out && (*out)[1][0] == 4);
	}
#if defined(__cpp_exceptions)
	try {
		client::connect("nothing", p).value();
		return 1;
	} catch (const error &e) {
		CHECK(e.code == RB_ERR_UNKNOWN_MODEL && std::strstr(e.what(), "nothing"));
	}
#endif
	serving.join();

	auto texts = worker::attach("texts", "t:str[<=4] -> u:str[<=4]", o);
	CHECK(texts);
	std::thread echoing([w = std::move(*texts)]() mutable {
		auto b = w.next();
		CHECK(b);
		std::memcpy(b->output<char>(0, 0)->data(), b->input<char>(0, 0)->data(), 4);
		CHECK(b->complete());
	});
	client reader = std::move(client::connect("texts", p).value());
	std::vector<char> t(4), u(4);
	CHECK(rb_text_write(t.data(), 4, "h\xc3\xa9", 3) == RB_OK && reader.infer(1, {t}, {u}) && u == t);
	CHECK(reader.infer(1, {std::vector<signed char>(4)}, {u}).code() == RB_ERR_DTYPE);
	echoing.join();
	std::puts("ok");
}
