// SPDX-License-Identifier: BSD-3-Clause
// The real libraries: graphs are compiled, written, inspected, loaded and executed on the
// simulator. Skipped where no library is found; QNN_SDK_ROOT names one.
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <thread>

#include "check.h"
#include "core/file.h"
#include "graph/builder.h"
#include "graph/context.h"
#include "qnn/backend.h"
#include "qnn/discovery.h"

namespace fs = std::filesystem;
using namespace executorch_qnn;
using abi::DataType;
using abi::TensorKind;

namespace {

constexpr uint32_t kSm8650 = 57;

// fp16 as QNN stores it; enough for the small whole numbers and halves used here.
uint16_t half(float value) {
  if (value == 0) return 0;
  int exponent = 0;
  float fraction = std::frexp(std::fabs(value), &exponent);
  auto mantissa = static_cast<uint16_t>(std::lround((fraction * 2 - 1) * 1024));
  auto bits = static_cast<uint16_t>(((exponent - 1 + 15) << 10) + mantissa);
  return value < 0 ? bits | 0x8000 : bits;
}

float whole(uint16_t bits) {
  int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                              : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
  return (bits & 0x8000) != 0 ? -value : value;
}

std::vector<uint16_t> halves(size_t count, float (*value)(size_t)) {
  std::vector<uint16_t> result(count);
  for (size_t i = 0; i < count; ++i) result[i] = half(value(i));
  return result;
}

const std::shared_ptr<const Backend>& backend() {
  // Never freed: QNN's own static objects go first.
  static const auto& kBackend = *new std::shared_ptr<const Backend>([] {
    auto found = find_library("", {}).best();
    if (!found.ok()) SKIP_ALL("no QNN libraries; set QNN_SDK_ROOT");
    auto library = Library::load(found.value().folder);
    CHECK_OK(library.status());
    std::fprintf(stderr, "QAIRT %s\n", library.value()->build_id().c_str());
    auto backend = Backend::create(library.value(), kSm8650);
    CHECK_OK(backend.status());
    return backend.value();
  }());
  return kBackend;
}

TensorSpec spec(const char* name, TensorKind kind, DataType dtype, std::vector<uint32_t> dims) {
  TensorSpec result;
  result.name = name;
  result.kind = kind;
  result.dtype = dtype;
  result.dims = std::move(dims);
  return result;
}

// A graph on its way from parts to results.
class Session {
 public:
  Session()
      : building_(ContextBuilder::create(backend()).value()),
        builder_(building_->create_graph("g").value()) {}

  uint32_t input(const char* name, DataType dtype, std::vector<uint32_t> dims) {
    return add(spec(name, TensorKind::kInput, dtype, std::move(dims)));
  }
  uint32_t output(const char* name, DataType dtype, std::vector<uint32_t> dims) {
    return add(spec(name, TensorKind::kOutput, dtype, std::move(dims)));
  }
  template <class T>
  uint32_t constant(const char* name, DataType dtype, std::vector<uint32_t> dims,
                    const std::vector<T>& values) {
    return add(spec(name, TensorKind::kStatic, dtype, std::move(dims)), values.data(),
               values.size() * sizeof(T));
  }
  void node(const NodeSpec& node) { CHECK_OK(builder_->add_node(node)); }

  // Compiles and loads again through a file.
  FinalizeReport compile() {
    FinalizeReport report = builder_->finalize().value();
    std::string path = (fs::temp_directory_path() / ("sim-" + std::to_string(getpid()))).string();
    uint64_t size = building_->write_binary(path).value();
    CHECK_EQ(fs::file_size(path), size);
    {
      MappedFile file = MappedFile::open(path).value();
      loaded_ = ExecutableContext::load(backend(), file.data(), file.size()).value();
    }
    fs::remove(path);
    graph_ = loaded_->graph("g").value();
    return report;
  }

  const ExecutableGraph& graph() const { return *graph_; }

  // Executes with addresses in the order in which the tensors were added.
  Status run(std::vector<void*> inputs, std::vector<void*> outputs) const {
    std::vector<abi::Tensor> in, out;
    for (size_t i = 0; i < inputs.size(); ++i) {
      in.push_back(ExecutableGraph::bind(graph_->inputs()[i], inputs[i]));
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      out.push_back(ExecutableGraph::bind(graph_->outputs()[i], outputs[i]));
    }
    return graph_->execute(in.data(), in.size(), out.data(), out.size());
  }

 private:
  uint32_t add(TensorSpec tensor, const void* data = nullptr, uint64_t size = 0) {
    auto index = builder_->add_tensor(std::move(tensor), data, size);
    CHECK_OK(index.status());
    return index.value();
  }

  std::shared_ptr<ContextBuilder> building_;
  std::shared_ptr<GraphBuilder> builder_;
  std::shared_ptr<ExecutableContext> loaded_;
  std::shared_ptr<const ExecutableGraph> graph_;
};

}  // namespace

TEST(adding_two_inputs) {
  Session session;
  uint32_t a = session.input("a", DataType::kFloat16, {1, 64});
  uint32_t b = session.input("b", DataType::kFloat16, {1, 64});
  uint32_t sum = session.output("sum", DataType::kFloat16, {1, 64});
  session.node({"add", "ElementWiseAdd", {a, b}, {sum}, {}});
  FinalizeReport report = session.compile();
  CHECK(report.ddr.read > 0);
  CHECK(report.ddr.write > 0);
  CHECK_CONTAINS(report.log, "Completed stage: Completion");

  auto x = halves(64, [](size_t i) { return static_cast<float>(i); });
  auto y = halves(64, [](size_t i) { return 0.5f * static_cast<float>(i); });
  std::vector<uint16_t> z(64);
  CHECK_OK(session.run({x.data(), y.data()}, {z.data()}));
  for (size_t i = 0; i < 64; ++i) CHECK_EQ(whole(z[i]), 1.5f * static_cast<float>(i));
}

TEST(a_linear_layer_with_softmax) {
  constexpr uint32_t kIn = 128, kOut = 64;
  Session session;
  uint32_t x = session.input("x", DataType::kFloat16, {1, kIn});
  auto weights =
      halves(kIn * kOut, [](size_t i) { return static_cast<float>(i % 7) / 64 - 0.04f; });
  uint32_t w = session.constant("w", DataType::kFloat16, {kOut, kIn}, weights);
  uint32_t y = session.output("y", DataType::kFloat16, {1, kOut});
  uint32_t p = session.output("p", DataType::kFloat16, {1, kOut});
  session.node({"linear", "FullyConnected", {x, w}, {y}, {}});
  session.node({"softmax",
                "Softmax",
                {y},
                {p},
                {{"axis", ScalarParam{DataType::kUint32, int64_t{1}}},
                 {"beta", ScalarParam{DataType::kFloat32, 1.0}}}});
  session.compile();

  auto input = halves(kIn, [](size_t i) { return static_cast<float>(i % 5) - 2; });
  std::vector<uint16_t> linear(kOut), softmax(kOut);
  bool y_first = session.graph().outputs()[0].name == "y";
  CHECK_OK(session.run({input.data()}, y_first
                                           ? std::vector<void*>{linear.data(), softmax.data()}
                                           : std::vector<void*>{softmax.data(), linear.data()}));
  double sum = 0;
  for (uint32_t n = 0; n < kOut; ++n) {
    double expected = 0;
    for (uint32_t k = 0; k < kIn; ++k) expected += whole(input[k]) * whole(weights[n * kIn + k]);
    CHECK(std::fabs(whole(linear[n]) - expected) < 0.01);
    sum += whole(softmax[n]);
  }
  CHECK(std::fabs(sum - 1) < 0.01);
}

TEST(rows_are_scattered_in_place) {
  constexpr uint32_t kRows = 64, kWidth = 32;
  Session session;
  uint32_t cache = session.input("cache", DataType::kFloat16, {kRows, kWidth});
  uint32_t position = session.input("position", DataType::kInt32, {1, 1});
  uint32_t row = session.input("row", DataType::kFloat16, {1, kWidth});
  uint32_t updated = session.output("updated", DataType::kFloat16, {kRows, kWidth});
  session.node({"update", "ScatterNd", {cache, position, row}, {updated}, {}});
  session.compile();

  std::vector<uint16_t> memory(kRows * kWidth);
  for (int32_t step = 0; step < 3; ++step) {
    int32_t at = 5 + step;
    std::vector<uint16_t> values(kWidth, half(static_cast<float>(step + 1)));
    std::vector<void*> inputs;
    for (const TensorSpec& tensor : session.graph().inputs()) {
      if (tensor.name == "cache") inputs.push_back(memory.data());
      if (tensor.name == "position") inputs.push_back(&at);
      if (tensor.name == "row") inputs.push_back(values.data());
    }
    CHECK_OK(session.run(inputs, {memory.data()}));
  }
  for (uint32_t r = 0; r < kRows; ++r) {
    float expected = r >= 5 && r < 8 ? static_cast<float>(r - 4) : 0;
    for (uint32_t c = 0; c < kWidth; ++c) CHECK_EQ(whole(memory[r * kWidth + c]), expected);
  }
}

TEST(a_binary_tells_its_target_and_tensors) {
  auto context = ContextBuilder::create(backend()).value();
  GraphOptions options;
  options.vtcm_megabytes = 2;
  options.optimization_level = 3;
  auto graph = context->create_graph("named", options).value();
  uint32_t x = graph->add_tensor(spec("x", TensorKind::kInput, DataType::kFloat16, {3, 5})).value();
  uint32_t y =
      graph->add_tensor(spec("y", TensorKind::kOutput, DataType::kFloat16, {3, 5})).value();
  CHECK_OK(graph->add_node({"relu", "Relu", {x}, {y}, {}}));
  CHECK_OK(graph->finalize().status());
  std::vector<uint8_t> binary = context->binary().value();
  CHECK_VALUE(info, inspect_context(*backend()->library(), binary.data(), binary.size()));
  CHECK_EQ(info.soc_model, kSm8650);
  CHECK_EQ(info.dsp_arch, 75u);
  CHECK_EQ(info.build_id, backend()->library()->build_id());
  const GraphDescription* named = info.find("named");
  CHECK(named != nullptr);
  CHECK_EQ(named->vtcm_bytes, 2u << 20);
  CHECK_EQ(named->optimization_level, 3u);
  CHECK_EQ(named->inputs[0].name, "x");
  CHECK(named->inputs[0].dims == (std::vector<uint32_t>{3, 5}));
}

TEST(an_op_that_qnn_refuses_comes_with_qnns_reason) {
  std::vector<TensorSpec> tensors = {spec("x", TensorKind::kInput, DataType::kFloat16, {1, 64}),
                                     spec("y", TensorKind::kOutput, DataType::kFloat16, {1, 63})};
  Status status = validate_op(*backend(), tensors, {nullptr, nullptr}, {"r", "Relu", {0}, {1}, {}});
  CHECK_EQ(status.code(), 3110u);
  CHECK_CONTAINS(status.message(), "64 != 63");
}

TEST(a_graph_that_cannot_be_compiled_is_an_error) {
  auto context = ContextBuilder::create(backend()).value();
  auto graph = context->create_graph("g").value();
  uint32_t x =
      graph->add_tensor(spec("x", TensorKind::kInput, DataType::kFloat16, {1, 64})).value();
  uint32_t y =
      graph->add_tensor(spec("y", TensorKind::kNative, DataType::kFloat16, {1, 64})).value();
  CHECK_OK(graph->add_node({"relu", "Relu", {x}, {y}, {}}));
  Status status = graph->finalize().status();  // it has no output
  CHECK(status.kind() == ErrorKind::kQnn);
  CHECK_CONTAINS(status.message(), "compiling graph g");
}

TEST(bytes_that_are_no_binary_are_refused) {
  std::vector<uint8_t> noise(1000, 0xA5);
  CHECK(!ExecutableContext::load(backend(), noise.data(), noise.size()).ok());
}

TEST(threads_compile_and_run_on_backends_of_their_own) {
  auto library = backend()->library();
  std::string failures[2];
  auto work = [&](int index) {
    for (int i = 0; i < 3; ++i) {
      auto own = Backend::create(library, index == 0 ? 57 : 69);
      if (!own.ok()) return void(failures[index] = own.status().message());
      auto context = ContextBuilder::create(own.value()).value();
      auto graph = context->create_graph("g").value();
      uint32_t x =
          graph->add_tensor(spec("x", TensorKind::kInput, DataType::kFloat16, {1, 64})).value();
      uint32_t y =
          graph->add_tensor(spec("y", TensorKind::kOutput, DataType::kFloat16, {1, 64})).value();
      Status status = graph->add_node({"relu", "Relu", {x}, {y}, {}});
      if (status.ok()) status = graph->finalize().status();
      if (!status.ok()) return void(failures[index] = status.message());
      std::vector<uint8_t> binary = context->binary().value();
      auto loaded = ExecutableContext::load(own.value(), binary.data(), binary.size()).value();
      if (loaded->description().soc_model != (index == 0 ? 57u : 69u))
        failures[index] = "wrong SoC";
      auto executable = loaded->graph("g").value();
      std::vector<uint16_t> in(64, half(-1)), out(64, half(1));
      abi::Tensor a = ExecutableGraph::bind(executable->inputs()[0], in.data());
      abi::Tensor b = ExecutableGraph::bind(executable->outputs()[0], out.data());
      if (!executable->execute(&a, 1, &b, 1).ok() || out[5] != 0) failures[index] = "wrong result";
    }
  };
  std::thread one(work, 0), two(work, 1);
  one.join();
  two.join();
  CHECK_EQ(failures[0], "");
  CHECK_EQ(failures[1], "");
}

TEST_MAIN()
