// SPDX-License-Identifier: BSD-3-Clause
// The delegate, called as ExecuTorch calls it, on the null provider.
#include <atomic>
#include <cmath>
#include <thread>

#include "delegate/store_registry.h"
#include "runtime/allocations.h"
#include "runtime/support.h"

using namespace support;

namespace {

// A counter in place, a delay line, and an I/O pair that is converted and one that is not.
std::vector<Payload> counter_payloads(std::vector<std::string> graphs = {"forward_0"}) {
  std::vector<Payload> all;
  for (std::string& graph : graphs) {
    all.push_back(
        payload(std::move(graph),
                {state("n", StateBinding::kInPlace), state("d", StateBinding::kDoubleBuffer)},
                {tensor("x", ScalarType::kInt32, abi::DataType::kInt32, {1, 4}),
                 tensor("t", ScalarType::kInt64, abi::DataType::kInt32, {2})},
                {tensor("y", ScalarType::kInt32, abi::DataType::kInt32, {1, 4}),
                 tensor("u", ScalarType::kInt64, abi::DataType::kInt32, {2})}));
  }
  return all;
}

// A program's first delegate, with a store of its own.
struct Loaded {
  explicit Loaded(const Program& program) : delegate(program, 0, load, token.text()) {}

  Load load;
  std::shared_ptr<StateStore> store = std::make_shared<StateStore>();
  StoreToken token{store, ""};
  Delegate delegate;
};

struct Call {
  Arg x{ScalarType::kInt32, {1, 4}}, t{ScalarType::kInt64, {2}};
  Arg y{ScalarType::kInt32, {1, 4}}, u{ScalarType::kInt64, {2}};
  std::vector<et::EValue*> args{&x.value, &t.value, &y.value, &u.value};
};

int32_t counter(StateStore& store, const char* name = "n") {
  int32_t values[4];
  CHECK_OK(store.read(*store.find(name), values, sizeof values));
  return values[0];
}

}  // namespace

TEST(the_backend_is_registered_under_its_id) {
  CHECK(backend().is_available());
  CHECK(et::get_backend_class("QnnDelegate") == &backend());
}

TEST(a_call_converts_at_the_boundary_and_steps_the_state) {
  Program program(counter_payloads());
  Loaded loaded(program);
  CHECK_OK(loaded.delegate.failure);
  Call call;
  call.x.as<int32_t>()[2] = 5;
  call.t.as<int64_t>()[1] = -3;
  for (int i = 1; i <= 3; ++i) {
    CHECK(loaded.delegate.execute(call.args) == et::Error::Ok);
    CHECK_EQ(call.y.as<int32_t>()[2], 5);
    CHECK_EQ(call.y.as<int32_t>()[0], 1);
    CHECK_EQ(call.u.as<int64_t>()[1], -3);
    CHECK_EQ(counter(*loaded.store, "n"), i);
    CHECK_EQ(counter(*loaded.store, "d"), i);
  }
}

TEST(floats_cross_as_fp16_whatever_their_value) {
  for (const ScalarType host : {ScalarType::kFloat32, ScalarType::kFloat64}) {
    Program program({payload("f", {}, {tensor("x", host, abi::DataType::kFloat16, {6})},
                             {tensor("y", host, abi::DataType::kFloat16, {6})})});
    Load load;
    Delegate delegate(program, 0, load);
    CHECK_OK(delegate.failure);
    Arg x(host, {6}), y(host, {6});
    std::vector<et::EValue*> args{&x.value, &y.value};
    const double from[] = {0, NAN, INFINITY, -INFINITY, -1e9, 0.333251953125};
    const double expected[] = {0x1p-24, NAN, INFINITY, -INFINITY, -65504, 0.333251953125};
    const bool wide = host == ScalarType::kFloat64;
    for (size_t i = 0; i < 6; ++i) {
      if (wide) x.as<double>()[i] = from[i];
      if (!wide) x.as<float>()[i] = static_cast<float>(from[i]);
    }
    CHECK(delegate.execute(args) == et::Error::Ok);
    for (size_t i = 0; i < 6; ++i) {
      const double got = wide ? y.as<double>()[i] : static_cast<double>(y.as<float>()[i]);
      CHECK(got == expected[i] || (std::isnan(got) && std::isnan(expected[i])));
    }
  }
}

TEST(floats_cross_as_integers_in_the_tensor_s_encoding) {
  const TensorEncoding in{true, 0.5F, -100}, out{true, 0.25F, 3};
  for (const ScalarType host : {ScalarType::kFloat16, ScalarType::kFloat32, ScalarType::kFloat64}) {
    Program program({payload("f", {},
                             {tensor("x", host, abi::DataType::kUFixed16, {3}, in),
                              tensor("w", host, abi::DataType::kUFixed16, {3}, in)},
                             {tensor("raw", ScalarType::kUint16, abi::DataType::kUFixed16, {3}, in),
                              tensor("y", host, abi::DataType::kSFixed16, {3}, out)})});
    Load load;
    Delegate delegate(program, 0, load);
    CHECK_OK(delegate.failure);
    Arg x(host, {3}), w(host, {3}), raw(ScalarType::kUint16, {3}), y(host, {3});
    std::vector<et::EValue*> args{&x.value, &w.value, &raw.value, &y.value};
    const Converter half = *converter(ScalarType::kFloat32, abi::DataType::kFloat16);
    const auto put = [&](Arg& arg, std::vector<float> values) {
      if (host == ScalarType::kFloat16) half.to_npu(values.data(), arg.as<uint16_t>(), 3);
      if (host == ScalarType::kFloat32) std::copy(values.begin(), values.end(), arg.as<float>());
      if (host == ScalarType::kFloat64) std::copy(values.begin(), values.end(), arg.as<double>());
    };
    const auto get = [&](Arg& arg) {
      std::vector<float> values(3);
      if (host == ScalarType::kFloat16) half.to_host(arg.as<uint16_t>(), values.data(), 3);
      if (host == ScalarType::kFloat32) std::copy_n(arg.as<float>(), 3, values.begin());
      if (host == ScalarType::kFloat64) std::copy_n(arg.as<double>(), 3, values.begin());
      return values;
    };
    put(x, {1.25F, -INFINITY, NAN});
    put(w, {-30, 40, 0});
    const auto execute = [&] {
      if (!allocations::counted()) return delegate.execute(args);
      allocations::Counter counter;
      const et::Error error = delegate.execute(args);
      CHECK_EQ(counter.count(), 0u);
      return error;
    };
    CHECK(execute() == et::Error::Ok);
    // The null graph adds one to the first byte of each.
    const auto* q = raw.as<uint16_t>();
    CHECK(q[0] == 102 + 1 && q[1] == 0 && q[2] == 0);
    CHECK(get(y) == (std::vector<float>{(40 + 1 + 3) * 0.25F, (180 + 3) * 0.25F, 103 * 0.25F}));
  }
}

TEST(an_in_place_slot_has_one_address_and_it_is_what_qnn_gets) {
  Program program(counter_payloads());
  Loaded loaded(program);
  Call call;
  const StateSlot* n = loaded.store->find("n");
  const StateSlot* d = loaded.store->find("d");
  for (int i = 0; i < 4; ++i) {
    const void* front = d->front();
    CHECK(loaded.delegate.execute(call.args) == et::Error::Ok);
    CHECK(null_input(0) == n->front() && null_output(0) == n->front());
    CHECK(null_input(1) == front && null_output(1) != front);
    CHECK(d->front() == null_output(1));
    // What needs no conversion is bound where ExecuTorch has it.
    CHECK(null_input(2) == call.x.memory.data() && null_output(2) == call.y.memory.data());
    CHECK(null_input(3) != call.t.memory.data());
  }
}

TEST(an_execution_allocates_nothing_and_copies_no_state) {
  if (!allocations::counted()) return;
  Program program(counter_payloads());
  Loaded loaded(program);
  Call call;
  const uint64_t copied = loaded.store->bytes_copied();
  for (int i = 0; i < 5; ++i) {
    allocations::Counter counter;
    const et::Error error = loaded.delegate.execute(call.args);
    CHECK_EQ(counter.count(), 0u);
    CHECK(error == et::Error::Ok);
  }
  CHECK_EQ(loaded.store->bytes_copied(), copied);
  allocations::Counter control;
  delete new std::string(100, 'x');
  CHECK(control.count() >= 2);
}

namespace {

// Two caches of five rows, of which each call writes two; "v" has two blocks.
Program row_program() {
  return Program({payload("f",
                          {delta("k", {5, 2}, "rows", {"at", 0, 1, 5, 2, 2}),
                           delta("v", {2, 5, 1}, "rows", {"at", 4, 2, 5, 1, 2})},
                          {tensor("x", ScalarType::kInt32, abi::DataType::kInt32, {8}),
                           tensor("p", ScalarType::kInt32, abi::DataType::kInt32, {2})},
                          {})});
}

struct RowCall {
  Arg x{ScalarType::kInt32, {8}}, p{ScalarType::kInt32, {2}};
  std::vector<et::EValue*> args{&x.value, &p.value};

  // The null graph adds one to the first of each.
  RowCall(std::vector<int32_t> rows, std::vector<int32_t> at) {
    std::copy(rows.begin(), rows.end(), x.as<int32_t>());
    std::copy(at.begin(), at.end(), p.as<int32_t>());
    --x.as<int32_t>()[0];
    --p.as<int32_t>()[0];
  }
};

std::vector<int32_t> values(StateStore& store, const char* name) {
  std::vector<int32_t> all(10);
  CHECK_OK(store.read(*store.find(name), all.data(), all.size() * sizeof(int32_t)));
  return all;
}

}  // namespace

TEST(new_rows_are_placed_where_the_graph_says) {
  Program program = row_program();
  Loaded loaded(program);
  CHECK_OK(loaded.delegate.failure);
  RowCall call({1, 2, 3, 4, 5, 6, 7, 8}, {4, 1});
  CHECK(loaded.delegate.execute(call.args) == et::Error::Ok);
  CHECK(values(*loaded.store, "k") == (std::vector<int32_t>{0, 0, 3, 4, 0, 0, 0, 0, 1, 2}));
  CHECK(values(*loaded.store, "v") == (std::vector<int32_t>{0, 6, 0, 0, 5, 0, 8, 0, 0, 7}));
  RowCall twice({1, 1, 9, 9, 1, 9, 1, 9}, {2, 2});  // of equal positions the last one counts
  if (allocations::counted()) {
    allocations::Counter counter;
    const et::Error error = loaded.delegate.execute(twice.args);
    CHECK_EQ(counter.count(), 0u);
    CHECK(error == et::Error::Ok);
  } else {
    CHECK(loaded.delegate.execute(twice.args) == et::Error::Ok);
  }
  CHECK(values(*loaded.store, "k") == (std::vector<int32_t>{0, 0, 3, 4, 9, 9, 0, 0, 1, 2}));
  CHECK(values(*loaded.store, "v") == (std::vector<int32_t>{0, 6, 9, 0, 5, 0, 8, 9, 0, 7}));
}

TEST(a_position_outside_of_the_buffer_is_refused_and_no_row_is_placed) {
  Program program = row_program();
  Loaded loaded(program);
  for (const int32_t wrong : {5, -1, INT32_MAX, INT32_MIN}) {
    RowCall call({1, 2, 3, 4, 5, 6, 7, 8}, {3, wrong});
    CHECK(loaded.delegate.execute(call.args) != et::Error::Ok);
    CHECK(take_failure().message().find("position " + std::to_string(wrong)) != std::string::npos);
    CHECK(values(*loaded.store, "k") == std::vector<int32_t>(10));
    CHECK(values(*loaded.store, "v") == std::vector<int32_t>(10));
  }
}

TEST(rows_of_quantized_buffers_are_placed_byte_by_byte) {
  const struct {
    abi::DataType type;
    TensorEncoding encoding;
  } cases[] = {{abi::DataType::kUFixed8, {true, 0.5F, -128}},
               {abi::DataType::kSFixed8, {true, 0.5F, 0}},
               {abi::DataType::kUFixed16, {true, 0.5F, -32768}},
               {abi::DataType::kSFixed16, {true, 0.5F, 7}}};
  for (const auto& c : cases) {
    // Both buffers' rows are in one tensor, behind an element that is nobody's.
    PayloadState k = delta("k", {3, 2}, "rows", {"at", 1, 1, 3, 2, 1});
    PayloadState v = delta("v", {2, 3, 1}, "rows", {"at", 3, 2, 3, 1, 1});
    for (PayloadState* s : {&k, &v}) {
      s->descriptor.host_type = ScalarType::kFloat32;
      s->descriptor.stored_type = s->npu_type = c.type;
      s->descriptor.encoding = c.encoding;
    }
    Program program({payload("f", {k, v},
                             {tensor("x", ScalarType::kFloat32, c.type, {5}, c.encoding),
                              tensor("p", ScalarType::kInt32, abi::DataType::kInt32, {1})},
                             {})});
    Loaded loaded(program);
    CHECK_OK(loaded.delegate.failure);
    Arg x(ScalarType::kFloat32, {5}), p(ScalarType::kInt32, {1});
    std::vector<et::EValue*> args{&x.value, &p.value};
    const float rows[] = {0, 1.5F, -2.5F, 20, -30};
    std::copy(std::begin(rows), std::end(rows), x.as<float>());
    p.as<int32_t>()[0] = 1;  // the null graph makes it 2
    CHECK(loaded.delegate.execute(args) == et::Error::Ok);
    const float start = static_cast<float>(c.encoding.offset) * 0.5F;  // zeros, as stored
    float got[6];
    CHECK_OK(loaded.store->read(*loaded.store->find("k"), got, sizeof got));
    const float expected_k[] = {start, start, start, start, 1.5F, -2.5F};
    CHECK(std::equal(std::begin(got), std::end(got), expected_k));
    CHECK_OK(loaded.store->read(*loaded.store->find("v"), got, sizeof got));
    const float expected_v[] = {start, start, 20, start, start, -30};
    CHECK(std::equal(std::begin(got), std::end(got), expected_v));
  }
}

TEST(a_slot_wider_than_the_graph_takes_what_is_added) {
  PayloadState s =
      state("m", StateBinding::kAccumulate, {3}, ScalarType::kFloat32, abi::DataType::kFloat32);
  s.npu_type = abi::DataType::kFloat16;
  s.scale = 4;
  PayloadState copied =
      state("c", StateBinding::kCopied, {3}, ScalarType::kFloat32, abi::DataType::kFloat32);
  copied.npu_type = abi::DataType::kFloat16;
  Program program({payload("f", {s, copied}, {}, {})});
  Loaded loaded(program);
  CHECK_OK(loaded.delegate.failure);
  const float start[] = {0x1p-20F, 4096.5F, 1.0F};
  CHECK_OK(loaded.store->write(*loaded.store->find("m"), start, sizeof start));
  CHECK_OK(loaded.store->write(*loaded.store->find("c"), start, sizeof start));
  std::vector<et::EValue*> none;
  CHECK(loaded.delegate.execute(none) == et::Error::Ok);
  // The null graph gives back what it read, rounded to fp16, one unit more in the first place.
  float m[3], c[3];
  CHECK_OK(loaded.store->read(*loaded.store->find("m"), m, sizeof m));
  CHECK_OK(loaded.store->read(*loaded.store->find("c"), c, sizeof c));
  CHECK(m[0] == 0x1p-20F + 0x1.1p-22F && m[1] == 4096.5F + 1024 && m[2] == 1.25F);
  CHECK(c[0] == 0x1.1p-20F && c[1] == 4096 && c[2] == 1);
}

TEST(initial_values_are_honoured_on_a_used_heap) {
  // What a fresh process hides: memory that somebody else has used before.
  for (int round = 0; round < 3; ++round) {
    std::vector<std::unique_ptr<Bytes>> dirt;
    for (int i = 0; i < 200; ++i) dirt.push_back(std::make_unique<Bytes>(16 + i % 512, 0x5A));
    dirt.clear();
    auto payloads = counter_payloads();
    payloads[0].states[1].initial_key = "d_initial";
    Program program(payloads);
    program.data.entries["d_initial"] = Bytes{9, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0};
    Load load;
    auto store = std::make_shared<StateStore>();
    StoreToken token(store, "");
    Delegate delegate(program, 0, load, token.text());
    CHECK_OK(delegate.failure);
    CHECK_EQ(counter(*store, "n"), 0);
    int32_t d[4];
    CHECK_OK(store->read(*store->find("d"), d, sizeof d));
    CHECK_EQ(d[0], 9);
    CHECK_EQ(d[3], 3);
    Call call;
    CHECK(delegate.execute(call.args) == et::Error::Ok);
    CHECK_EQ(counter(*store, "d"), 10);
    store->reset();
    CHECK_EQ(counter(*store, "d"), 9);
  }
}

TEST(the_context_is_mapped_only_while_it_is_loaded) {
  Program program(counter_payloads());
  Load load;
  const int loads = null_count(kLoads);
  Delegate a(program, 0, load);
  CHECK_EQ(program.data.lent, 0);
  Load other;
  Delegate b(program, 0, other);
  CHECK_EQ(null_count(kLoads), loads + 1);  // shared
  CHECK_EQ(null_count(kContexts), 1);
}

// ------------------------------------------------------------------------------------- sharing

TEST(partitions_of_one_load_and_methods_of_one_program_share_their_state) {
  Program program(counter_payloads({"prefill_0", "decode_0", "decode_1"}));
  Load prefill, decode;
  prefill.method = "prefill";
  decode.method = "decode";
  Delegate a(program, 0, prefill), b(program, 1, decode), c(program, 2, decode);
  Call call;
  for (Delegate* delegate : {&a, &b, &c}) CHECK(delegate->execute(call.args) == et::Error::Ok);
  const void* slot = null_input(0);
  CHECK_EQ(static_cast<const int32_t*>(slot)[0], 3);
  CHECK(a.execute(call.args) == et::Error::Ok);
  CHECK(null_input(0) == slot);
  // The double buffer moved three times; a must have followed.
  CHECK_EQ(static_cast<const int32_t*>(null_output(1))[0], 4);
}

TEST(a_second_load_of_a_method_starts_fresh) {
  Program program(counter_payloads({"prefill_0", "decode_0"}));
  Load prefill, decode, again, prefill_again;
  prefill.method = prefill_again.method = "prefill";
  decode.method = again.method = "decode";
  Call call;
  Delegate a(program, 0, prefill), b(program, 1, decode);
  CHECK(b.execute(call.args) == et::Error::Ok);
  CHECK(b.execute(call.args) == et::Error::Ok);
  Delegate c(program, 1, again);
  CHECK(c.execute(call.args) == et::Error::Ok);
  CHECK_EQ(static_cast<const int32_t*>(null_input(0))[0], 1);
  const void* second = null_input(0);
  Delegate d(program, 0, prefill_again);  // belongs to the newest that has no prefill yet
  CHECK(d.execute(call.args) == et::Error::Ok);
  CHECK(null_input(0) == second);
  CHECK(a.execute(call.args) == et::Error::Ok);
  CHECK_EQ(static_cast<const int32_t*>(null_input(0))[0], 3);
}

TEST(programs_do_not_share) {
  Program one(counter_payloads()), two(counter_payloads());
  Load load_one, load_two;
  Delegate a(one, 0, load_one), b(two, 0, load_two);
  Call call;
  CHECK(a.execute(call.args) == et::Error::Ok);
  CHECK(b.execute(call.args) == et::Error::Ok);
  CHECK_EQ(static_cast<const int32_t*>(null_input(0))[0], 1);
}

TEST(delegates_may_be_destroyed_in_any_order) {
  Program program(counter_payloads({"a", "b", "c"}));
  const int orders[][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
  for (const auto& order : orders) {
    Load load;
    std::vector<std::unique_ptr<Delegate>> delegates;
    for (size_t i = 0; i < 3; ++i) {
      delegates.push_back(std::make_unique<Delegate>(program, i, load));
    }
    Call call;
    int expected = 0;
    for (int gone : order) {
      for (const auto& delegate : delegates) {
        if (delegate == nullptr) continue;
        CHECK(delegate->execute(call.args) == et::Error::Ok);
        CHECK_EQ(static_cast<const int32_t*>(null_input(0))[0], ++expected);
      }
      delegates[static_cast<size_t>(gone)].reset();
    }
    CHECK_EQ(null_count(kContexts), 0);
  }
}

TEST(a_thousand_loads_and_unloads_leave_nothing) {
  Program program(counter_payloads());
  const size_t before = allocations::in_use();
  for (int i = 0; i < 1000; ++i) {
    Load load;
    Delegate delegate(program, 0, load);
    CHECK_OK(delegate.failure);
    Call call;
    CHECK(delegate.execute(call.args) == et::Error::Ok);
  }
  CHECK_EQ(null_count(kContexts), 0);
  CHECK_EQ(null_count(kBackends), 1);  // kept, and shared by all
  CHECK_EQ(null_count(kDevices), 1);
  CHECK_EQ(program.data.lent, 0);
  // The null provider keeps 40 bytes for each graph it hands out.
  const size_t grown = allocations::in_use() - before;
  CHECK(!allocations::counted() || grown < 1000 * 64);
}

TEST(threads_wait_for_a_context_and_not_for_each_other_s_state) {
  Program program(counter_payloads(), null_qnn::kSleep);
  const int collisions = null_count(kCollisions);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      Load load;
      Delegate delegate(program, 0, load);
      Call call;
      for (int i = 0; i < 20; ++i) {
        if (delegate.execute(call.args) != et::Error::Ok) ++wrong;
        if (call.y.as<int32_t>()[0] != 1) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(wrong.load(), 0);
  CHECK_EQ(null_count(kCollisions), collisions);
}

// ------------------------------------------------------------------------------------- bad calls

namespace {

void check_argument_refused(size_t index, Arg& wrong, const char* text) {
  Program program(counter_payloads());
  Load load;
  auto store = std::make_shared<StateStore>();
  StoreToken token(store, "");
  Delegate delegate(program, 0, load, token.text());
  Call call;
  call.args[index] = &wrong.value;
  const int executions = null_count(kExecutions);
  CHECK(delegate.execute(call.args) == et::Error::InvalidArgument);
  CHECK_CONTAINS(take_failure().message(), text);
  CHECK_EQ(null_count(kExecutions), executions);
  CHECK_EQ(counter(*store), 0);
}

}  // namespace

TEST(wrong_arguments_are_named_and_nothing_runs) {
  Arg wrong_type(ScalarType::kFloat32, {1, 4});
  check_argument_refused(0, wrong_type, "input 0 must be a dense int32[1, 4], got float32[1, 4]");
  Arg wrong_shape(ScalarType::kInt32, {1, 5});
  check_argument_refused(0, wrong_shape, "got int32[1, 5]");
  Arg same_bytes(ScalarType::kInt32, {4, 1});
  check_argument_refused(0, same_bytes, "got int32[4, 1]");
  Arg wrong_rank(ScalarType::kInt32, {4});
  check_argument_refused(0, wrong_rank, "got int32[4]");
  Arg wrong_output(ScalarType::kInt32, {2});
  check_argument_refused(3, wrong_output, "output 1 must be a dense int64[2]");
  Arg scalar(ScalarType::kInt32, {});
  scalar.value = et::EValue(int64_t{3});
  check_argument_refused(1, scalar, "input 1 must be a dense int64[2], got no tensor");
}

TEST(a_strided_argument_is_refused) {
  auto payloads = counter_payloads();
  payloads[0].inputs[0].dims = payloads[0].inputs[0].npu_dims = {2, 2};
  payloads[0].outputs[0].dims = payloads[0].outputs[0].npu_dims = {2, 2};
  Program program(payloads);
  Load load;
  Delegate delegate(program, 0, load);
  Call call;
  Arg x(ScalarType::kInt32, {2, 2}, true), y(ScalarType::kInt32, {2, 2});
  call.args[0] = &x.value;
  call.args[2] = &y.value;
  CHECK(delegate.execute(call.args) == et::Error::InvalidArgument);
  CHECK_CONTAINS(take_failure().message(), "got a strided int32[2, 2]");
}

TEST(a_permutation_of_unit_dimensions_is_dense) {
  Program program(counter_payloads());
  Load load;
  Delegate delegate(program, 0, load);
  Call call;
  Arg x(ScalarType::kInt32, {1, 4}, true);
  call.args[0] = &x.value;
  CHECK(delegate.execute(call.args) == et::Error::Ok);
}

TEST(a_wrong_number_of_arguments_is_refused) {
  Program program(counter_payloads());
  Load load;
  Delegate delegate(program, 0, load);
  Call call;
  call.args.pop_back();
  CHECK(delegate.execute(call.args) == et::Error::InvalidArgument);
  CHECK_CONTAINS(take_failure().message(), "takes 2 inputs and 2 outputs, got 3 arguments");
}

TEST(an_int64_that_does_not_fit_is_refused_and_the_state_stays) {
  Program program(counter_payloads());
  Loaded loaded(program);
  Call call;
  call.t.as<int64_t>()[1] = int64_t{1} << 31;
  CHECK(loaded.delegate.execute(call.args) == et::Error::InvalidArgument);
  CHECK_CONTAINS(take_failure().message(), "input 1 holds an int64");
  CHECK_EQ(counter(*loaded.store), 0);
}

TEST(a_failure_of_qnn_carries_its_words_and_swaps_nothing) {
  Program program(counter_payloads(), null_qnn::kFail);
  Loaded loaded(program);
  Call call;
  const void* front = loaded.store->find("d")->front();
  CHECK(loaded.delegate.execute(call.args) == et::Error::Internal);
  const Status failure = take_failure();
  CHECK(failure.kind() == ErrorKind::kQnn);
  CHECK_CONTAINS(failure.message(), "the null graph fails as asked");
  CHECK(loaded.store->find("d")->front() == front);
}

// ------------------------------------------------------------------------------------- bad loads

namespace {

Status load_failure(const Program& program, const Payload& p, et::Error expected,
                    const std::string& libraries = ETQNN_NULL_QNN) {
  Load load;
  Delegate delegate(program.data, pack(p), load, "", libraries);
  CHECK_EQ(static_cast<int>(delegate.error), static_cast<int>(expected));
  return delegate.failure;
}

}  // namespace

TEST(libraries_that_are_not_there_are_reported) {
  Program program(counter_payloads());
  const Status status =
      load_failure(program, program.payloads[0], et::Error::NotFound, "/nowhere/at/all");
  CHECK(status.kind() == ErrorKind::kLibraryNotFound);
  CHECK_CONTAINS(status.message(), "/nowhere/at/all");
}

TEST(a_context_of_newer_libraries_is_incompatible) {
  Program program(counter_payloads());
  Payload p = program.payloads[0];
  p.core_minor = 41;
  const Status status = load_failure(program, p, et::Error::DelegateInvalidCompatibility);
  CHECK_CONTAINS(status.message(), "2.41");
  CHECK_CONTAINS(status.message(), "2.40");
  p.core_minor = 36;
  CHECK_OK(load_failure(program, p, et::Error::Ok));
}

TEST(a_context_for_another_soc_is_incompatible) {
  Program program(counter_payloads());
  DelegateOptions options = delegate_options();
  options.soc_model = 69;
  set_delegate_options(options);
  const Status status =
      load_failure(program, program.payloads[0], et::Error::DelegateInvalidCompatibility);
  options.soc_model = 0;
  set_delegate_options(options);
  CHECK_CONTAINS(status.message(), "compiled for SM8650 (SoC 57), this device is SoC 69");
}

TEST(a_damaged_context_never_reaches_qnn) {
  Program program(counter_payloads());
  const int loads = null_count(kLoads);
  Bytes& binary = program.data.entries["context"];
  for (size_t at = 0; at < binary.size(); at += 7) {
    binary[at] ^= 0x10;
    CHECK_CONTAINS(load_failure(program, program.payloads[0], et::Error::InvalidProgram).message(),
                   "SHA-256");
    binary[at] ^= 0x10;
  }
  binary.pop_back();
  CHECK_CONTAINS(load_failure(program, program.payloads[0], et::Error::InvalidProgram).message(),
                 "bytes");
  program.data.entries.clear();
  CHECK_CONTAINS(load_failure(program, program.payloads[0], et::Error::InvalidProgram).message(),
                 "no named data context");
  CHECK_EQ(null_count(kLoads), loads);
}

TEST(a_payload_that_does_not_fit_its_graph_is_refused) {
  const struct {
    const char* text;
    void (*change)(Payload&);
  } cases[] = {
      {"no graph named", [](Payload& p) { p.graph = "other"; }},
      {"no input z", [](Payload& p) { p.inputs[0].tensor = "z"; }},
      {"is used twice",
       [](Payload& p) {
         p.inputs[1].tensor = "x", p.inputs[1].npu_dims = {1, 4}, p.inputs[1].dims = {4};
       }},
      {"input t is INT32[2], expected INT32[1, 2]",
       [](Payload& p) { p.inputs[1].npu_dims = {1, 2}; }},
      {"output u is INT32[2], expected FLOAT16[2]",
       [](Payload& p) {
         p.outputs[1].host_type = ScalarType::kFloat32,
         p.outputs[1].npu_type = abi::DataType::kFloat16;
       }},
      {"is bound to nothing", [](Payload& p) { p.states.pop_back(); }},
      {"input x is INT32[1, 4], expected UFIXED16[1, 4]",
       [](Payload& p) {
         p.inputs[0].host_type = ScalarType::kFloat32,
         p.inputs[0].npu_type = abi::DataType::kUFixed16, p.inputs[0].encoding = {true, 1.0F, 0};
       }},
      {"input t is bound to nothing", [](Payload& p) { p.inputs[1].tensor.clear(); }},
      {"input n_in is INT32[4], expected INT32[2, 2]",
       [](Payload& p) { p.states[0].descriptor.dims = {2, 2}; }},
  };
  for (const auto& c : cases) {
    Program program(counter_payloads());
    Payload p = program.payloads[0];
    c.change(p);
    CHECK_CONTAINS(load_failure(program, p, et::Error::InvalidProgram).message(), c.text);
  }
}

TEST(an_encoding_that_is_not_the_graph_s_is_refused) {
  Program program({payload(
      "f", {}, {},
      {tensor("y", ScalarType::kFloat32, abi::DataType::kUFixed8, {4}, {true, 0.5F, -3})})});
  Payload p = program.payloads[0];
  CHECK_OK(load_failure(program, p, et::Error::Ok));
  for (const TensorEncoding& other : {TensorEncoding{true, 0.5F, 3}, {true, 0.25F, -3}}) {
    p.outputs[0].encoding = other;
    CHECK_CONTAINS(load_failure(program, p, et::Error::InvalidProgram).message(),
                   "output y has another encoding");
  }
}

TEST(buffers_that_two_methods_declare_differently_are_refused) {
  auto payloads = counter_payloads({"prefill_0", "decode_0"});
  payloads[1].states[0].descriptor.dims = {1, 4};
  Program program(payloads);
  Load prefill, decode;
  decode.method = "decode";
  Delegate a(program, 0, prefill);
  Delegate b(program, 1, decode);
  CHECK(b.error == et::Error::InvalidState);
  CHECK_CONTAINS(b.failure.message(), "n: int32[4] stored as INT32");
  CHECK_CONTAINS(b.failure.message(), "n: int32[1, 4] stored as INT32");
}

TEST(an_initial_value_of_the_wrong_size_is_refused) {
  Program program(counter_payloads());
  program.data.entries["short"] = Bytes(15);
  Payload p = program.payloads[0];
  p.states[0].initial_key = "short";
  CHECK_CONTAINS(load_failure(program, p, et::Error::InvalidProgram).message(), "has 15 bytes");
}

TEST(an_argument_the_graph_does_not_use_is_checked_and_ignored) {
  auto payloads = counter_payloads();
  payloads[0].inputs.push_back(tensor("", ScalarType::kFloat64, abi::DataType::kFloat16, {3}));
  Program program(payloads);
  Load load;
  Delegate delegate(program, 0, load);
  CHECK_OK(delegate.failure);
  Call call;
  Arg unused(ScalarType::kFloat64, {3});
  call.args.insert(call.args.begin() + 2, &unused.value);
  CHECK(delegate.execute(call.args) == et::Error::Ok);
  Arg wrong(ScalarType::kFloat64, {4});
  call.args[2] = &wrong.value;
  CHECK(delegate.execute(call.args) == et::Error::InvalidArgument);
}

TEST(an_unknown_token_or_option_is_refused) {
  Program program(counter_payloads());
  Load load;
  Delegate delegate(program, 0, load, "store 0");
  CHECK(delegate.error == et::Error::InvalidState);
  et::BackendOptions<1> options;
  (void)options.set_option("no_such_option", 3);
  CHECK(et::set_option(kBackendId, options.view()) == et::Error::InvalidArgument);
}

TEST_MAIN()
