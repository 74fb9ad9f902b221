// SPDX-License-Identifier: BSD-3-Clause
// Graphs and contexts on the fake library: errors, lifetimes, what is handed to QNN.
#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <new>

#include "check.h"
#include "graph/builder.h"
#include "graph/context.h"
#include "qnn/backend.h"

namespace fs = std::filesystem;
using namespace executorch_qnn;

namespace {
std::atomic<size_t> g_allocations{0};
}

// Counts what is allocated in this process with new.
void* operator new(size_t size) {
  ++g_allocations;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

// The fake library with its own view of what happened.
class Fake {
 public:
  explicit Fake(const char* name = "core_2_40")
      : folder_(std::string(ETQNN_FAKE_QNN "/") + name),
        library_(Library::load(folder_).value()),
        handle_(dlopen((folder_ + "/libQnnHtp.so").c_str(), RTLD_NOW | RTLD_NOLOAD)) {
    function<void()>("fake_reset")();
  }

  std::shared_ptr<const Backend> backend(uint32_t soc = 57) const {
    return Backend::create(library_, soc).value();
  }
  std::string journal() const { return function<const char*()>("fake_calls")(); }
  uint32_t soc(bool at8) const { return function<uint32_t(bool)>("fake_soc")(at8); }
  const abi::TensorV1& last_tensor() const {
    return function<const abi::Tensor*()>("fake_last_tensor")()->v1;
  }
  const std::shared_ptr<const Library>& library() const { return library_; }

 private:
  template <class Signature>
  Signature* function(const char* name) const {
    return reinterpret_cast<Signature*>(dlsym(handle_, name));
  }

  std::string folder_;
  std::shared_ptr<const Library> library_;
  void* handle_;
};

TensorSpec spec(const char* name, abi::TensorKind kind, std::vector<uint32_t> dims = {2, 4}) {
  TensorSpec result;
  result.name = name;
  result.kind = kind;
  result.dims = std::move(dims);
  return result;
}

TensorSpec weights(const char* name) { return spec(name, abi::TensorKind::kStatic); }

const char kBinary[100] = {1};

}  // namespace

// ------------------------------------------------------------------------------------- handles

TEST(handles_are_freed_in_the_reverse_order) {
  Fake fake;
  {
    std::shared_ptr<GraphBuilder> graph;
    {
      auto backend = fake.backend();
      auto context = ContextBuilder::create(backend).value();
      graph = context->create_graph("g").value();
    }
    CHECK_EQ(fake.journal(), "LBDCG");  // the graph keeps all that it needs
  }
  CHECK_EQ(fake.journal(), "LBDCGcdbl");
}

TEST(a_device_that_cannot_be_made_leaves_nothing_open) {
  Fake fake;
  Status status = Backend::create(fake.library(), 999).status();
  CHECK_EQ(status.code(), 14001u);
  CHECK_CONTAINS(status.message(), "SoC model 999");
  CHECK_CONTAINS(status.message(), "does not know the target SoC");
  CHECK_EQ(fake.journal(), "LBbl");
}

TEST(the_soc_model_is_given_in_both_layouts) {
  Fake fake;
  auto backend = fake.backend(69);
  CHECK_EQ(fake.soc(false), 69u);
  CHECK_EQ(fake.soc(true), 69u);
}

// ------------------------------------------------------------------------------------- tensors

TEST(static_data_is_handed_over_where_it_is) {
  Fake fake;
  auto graph = ContextBuilder::create(fake.backend()).value()->create_graph("g").value();
  std::vector<uint8_t> big(2 * 4096 * 2, 1);
  TensorSpec tensor = spec("w", abi::TensorKind::kStatic, {2, 4096});
  CHECK_OK(graph->add_tensor(tensor, big.data(), big.size()).status());
  CHECK_EQ(fake.last_tensor().buffer.data, big.data());
  CHECK_EQ(fake.last_tensor().buffer.size, big.size());
}

TEST(data_of_the_wrong_size_or_kind_is_refused) {
  Fake fake;
  auto graph = ContextBuilder::create(fake.backend()).value()->create_graph("g").value();
  uint8_t bytes[16] = {};
  CHECK_OK(graph->add_tensor(weights("w"), bytes, 16).status());
  CHECK_CONTAINS(graph->add_tensor(weights("w"), bytes, 15).status().message(), "15 bytes");
  CHECK_CONTAINS(graph->add_tensor(weights("w")).status().message(), "has no data");
  Status given = graph->add_tensor(spec("x", abi::TensorKind::kInput), bytes, 16).status();
  CHECK_CONTAINS(given.message(), "takes no data");
  TensorSpec odd = spec("x", abi::TensorKind::kInput);
  odd.dtype = static_cast<abi::DataType>(0x999);
  CHECK(graph->add_tensor(odd).status().kind() == ErrorKind::kInvalid);
  CHECK_EQ(graph->tensor_count(), 1u);
}

TEST(encodings_are_laid_out_as_qnn_wants_them) {
  Fake fake;
  auto graph = ContextBuilder::create(fake.backend()).value()->create_graph("g").value();
  TensorSpec tensor = spec("q", abi::TensorKind::kInput, {2, 3});
  Encoding& encoding = tensor.encoding;
  encoding = Encoding::scale_offset(0.5f, -3);
  CHECK_OK(graph->add_tensor(tensor).status());
  const abi::QuantizeParams& params = fake.last_tensor().quantize;
  CHECK_EQ(params.definition, abi::kEncodingDefined);
  CHECK_EQ(params.scale_offset.scale, 0.5f);
  CHECK_EQ(params.scale_offset.offset, -3);

  encoding.kind = abi::EncodingKind::kBitWidthAxisScaleOffset;
  encoding.bits = 4;
  encoding.axis = 1;
  encoding.scales = {1, 2, 3};
  encoding.offsets = {0, 0, 0};
  CHECK_OK(graph->add_tensor(tensor).status());
  CHECK_EQ(params.bit_width_axis.bits, 4u);
  CHECK_EQ(params.bit_width_axis.axis, 1);
  CHECK_EQ(params.bit_width_axis.count, 3u);

  encoding.kind = abi::EncodingKind::kBlockwiseExpansion;
  encoding.blocks_per_axis = 2;
  encoding.block_scales = {1, 2, 3, 4, 5, 6};
  CHECK_OK(graph->add_tensor(tensor).status());
  // QNN keeps this pointer; further tensors must not move what it points to.
  const abi::BlockwiseExpansion* kept = params.blockwise;
  for (int i = 0; i < 100; ++i) {
    CHECK_OK(graph->add_tensor(spec("more", abi::TensorKind::kInput)).status());
  }
  CHECK_EQ(kept->axis, 1);
  CHECK_EQ(kept->channels[2].scale, 3.0f);
  CHECK_EQ(kept->block_scales[5], 6);
}

TEST(encodings_that_do_not_fit_are_refused) {
  Fake fake;
  auto graph = ContextBuilder::create(fake.backend()).value()->create_graph("g").value();
  TensorSpec tensor = spec("q", abi::TensorKind::kInput, {2, 3});
  tensor.encoding.kind = abi::EncodingKind::kAxisScaleOffset;
  tensor.encoding.axis = 2;
  CHECK_CONTAINS(graph->add_tensor(tensor).status().message(), "axis 2");
  tensor.encoding.axis = 1;
  tensor.encoding.scales = {1, 1};
  tensor.encoding.offsets = {0, 0};
  CHECK_CONTAINS(graph->add_tensor(tensor).status().message(), "2 scales");
  tensor.encoding.kind = abi::EncodingKind::kBlockwiseExpansion;
  tensor.encoding.axis = 0;
  tensor.encoding.blocks_per_axis = 4;
  CHECK_CONTAINS(graph->add_tensor(tensor).status().message(), "block scales");
}

TEST(a_tensor_that_qnn_refuses_is_an_error_with_its_name_and_qnns_text) {
  Fake fake;
  auto graph = ContextBuilder::create(fake.backend()).value()->create_graph("g").value();
  Status status = graph->add_tensor(spec("bad", abi::TensorKind::kInput)).status();
  CHECK_EQ(status.code(), 7004u);
  CHECK_CONTAINS(status.message(), "creating tensor bad");
  CHECK_CONTAINS(status.message(), "no bad tensors today");
}

// ------------------------------------------------------------------------------------- nodes

TEST(nodes_are_validated_before_they_are_added) {
  Fake fake;
  auto graph = ContextBuilder::create(fake.backend()).value()->create_graph("g").value();
  CHECK_VALUE(x, graph->add_tensor(spec("x", abi::TensorKind::kInput)));
  CHECK_VALUE(y, graph->add_tensor(spec("y", abi::TensorKind::kOutput)));
  CHECK_OK(graph->add_node({"fine", "Relu", {x}, {y}, {}}));
  Status status = graph->add_node({"spoiled", "Bad", {x}, {y}, {}});
  CHECK_EQ(status.code(), 3110u);
  CHECK_CONTAINS(status.message(), "op spoiled (Bad)");
  CHECK_CONTAINS(status.message(), "QNN says: spoiled is 7 times bad\na worker thread agrees");
  CHECK(status.message().find("not an error") == std::string::npos);
  CHECK(status.message().rfind("agrees") == status.message().find("agrees"));
}

TEST(a_node_on_a_tensor_that_is_not_there_is_refused) {
  Fake fake;
  auto graph = ContextBuilder::create(fake.backend()).value()->create_graph("g").value();
  Status status = graph->add_node({"n", "Relu", {0}, {1}, {}});
  CHECK(status.kind() == ErrorKind::kInvalid);
  CHECK_CONTAINS(status.message(), "names tensor 0 of 0");
}

TEST(an_op_can_be_validated_without_a_graph) {
  Fake fake;
  auto backend = fake.backend();
  std::vector<TensorSpec> tensors = {spec("x", abi::TensorKind::kInput),
                                     spec("y", abi::TensorKind::kOutput)};
  std::vector<const void*> data = {nullptr, nullptr};
  CHECK_OK(validate_op(*backend, tensors, data, {"n", "Relu", {0}, {1}, {}}));
  CHECK_EQ(validate_op(*backend, tensors, data, {"n", "Bad", {0}, {1}, {}}).code(), 3110u);
  CHECK_EQ(fake.journal(), "LBD");
}

// ------------------------------------------------------------------------------------- finalize

TEST(finalize_reports_ddr_traffic_printed_or_logged) {
  for (const char* name : {"core_2_36", "core_2_40"}) {
    Fake fake(name);
    auto graph = ContextBuilder::create(fake.backend()).value()->create_graph("g").value();
    CHECK_VALUE(report, graph->finalize());
    CHECK_EQ(report.ddr.read, 8192u);
    CHECK_EQ(report.ddr.write, 2048u);
    CHECK_EQ(report.ddr.spill, 3u);
    CHECK_EQ(report.ddr.fill, 4u);
    CHECK_CONTAINS(report.log, "Completed stage: Everything");
    CHECK(report.seconds >= 0);
  }
}

TEST(a_text_without_a_summary_gives_zeros) {
  DdrTraffic traffic = parse_ddr_summary("read_total_bytes=5");
  CHECK_EQ(traffic.read, 0u);
  traffic = parse_ddr_summary("DDR bandwidth summary\nread_total_bytes=18446744073709551615");
  CHECK_EQ(traffic.read, UINT64_MAX);
}

TEST(a_graph_that_does_not_compile_says_why) {
  Fake fake;
  auto graph = ContextBuilder::create(fake.backend()).value()->create_graph("bad").value();
  Status status = graph->finalize().status();
  CHECK_EQ(status.code(), 1002u);
  CHECK_CONTAINS(status.message(), "compiling graph bad");
  CHECK_CONTAINS(status.message(), "out of luck");
}

TEST(a_finalized_graph_is_closed) {
  Fake fake;
  auto graph = ContextBuilder::create(fake.backend()).value()->create_graph("g").value();
  CHECK_OK(graph->finalize().status());
  CHECK_CONTAINS(graph->finalize().status().message(), "graph g is finalized");
  CHECK(!graph->add_tensor(spec("x", abi::TensorKind::kInput)).ok());
  CHECK(!graph->add_node({"n", "Relu", {}, {}, {}}).ok());
}

// ------------------------------------------------------------------------------------- binaries

TEST(a_context_binary_is_cut_to_what_was_written) {
  Fake fake;
  auto context = ContextBuilder::create(fake.backend()).value();
  CHECK_OK(context->create_graph("g").value()->finalize().status());
  std::string path = (fs::temp_directory_path() / ("ctx-" + std::to_string(getpid()))).string();
  CHECK_VALUE(size, context->write_binary(path));
  CHECK_EQ(size, 80u);
  CHECK_EQ(fs::file_size(path), 80u);
  fs::remove(path);
  CHECK_EQ(context->binary().value().size(), 80u);
}

TEST(a_context_with_an_unfinished_graph_has_no_binary) {
  Fake fake;
  auto context = ContextBuilder::create(fake.backend()).value();
  auto graph = context->create_graph("g").value();
  Status status = context->binary().status();
  CHECK(status.kind() == ErrorKind::kInvalid);
  CHECK_CONTAINS(status.message(), "not finalized");
}

TEST(a_binary_is_described_without_loading_it) {
  Fake fake;
  CHECK_VALUE(context, inspect_context(*fake.library(), kBinary, sizeof kBinary));
  CHECK_EQ(context.build_id, "v2.fake");
  CHECK_EQ(context.soc_model, 57u);
  CHECK_EQ(context.dsp_arch, 75u);
  CHECK_EQ(context.graphs.size(), 2u);
  const GraphDescription* graph = context.find("good");
  CHECK(graph != nullptr && context.find("other") == nullptr);
  CHECK_EQ(graph->spill_fill_bytes, 77u);
  CHECK_EQ(graph->vtcm_bytes, 8u << 20);
  CHECK(graph->safe_share_io);
  CHECK_EQ(graph->inputs[0].name, "x");
  CHECK_EQ(graph->inputs[0].id, 11u);
  CHECK_EQ(graph->inputs[0].bytes(), 16u);
}

TEST(a_binary_that_cannot_be_described_is_refused) {
  Fake fake;
  CHECK(inspect_context(*fake.library(), "V", 1).status().kind() == ErrorKind::kIncompatible);
  CHECK_EQ(inspect_context(*fake.library(), "X", 1).status().code(), 30002u);
  Fake without("core_2_99");
  Status status = inspect_context(*without.library(), kBinary, sizeof kBinary).status();
  CHECK(status.kind() == ErrorKind::kLibraryNotFound);
  CHECK_CONTAINS(status.message(), "libQnnSystem.so");
}

// ------------------------------------------------------------------------------------- execution

TEST(a_graph_is_executed_on_the_addresses_that_were_bound) {
  Fake fake;
  auto context = ExecutableContext::load(fake.backend(), kBinary, sizeof kBinary).value();
  auto graph = context->graph("good").value();
  char from[16] = "fifteen letters", to[16] = {};
  abi::Tensor input = ExecutableGraph::bind(graph->inputs()[0], from);
  abi::Tensor output = ExecutableGraph::bind(graph->outputs()[0], to);
  CHECK_EQ(input.v1.id, 11u);
  CHECK_EQ(output.v1.id, 12u);
  CHECK_OK(graph->execute(&input, 1, &output, 1));
  CHECK_EQ(std::string(to), "fifteen letters");
}

TEST(executing_allocates_nothing) {
  Fake fake;
  auto context = ExecutableContext::load(fake.backend(), kBinary, sizeof kBinary).value();
  auto graph = context->graph("good").value();
  char memory[16] = {};
  abi::Tensor input = ExecutableGraph::bind(graph->inputs()[0], memory);
  abi::Tensor output = ExecutableGraph::bind(graph->outputs()[0], memory);
  CHECK_OK(graph->execute(&input, 1, &output, 1));
  size_t before = g_allocations;
  bool ok = true;
  for (int i = 0; i < 100; ++i) ok = ok && graph->execute(&input, 1, &output, 1).ok();
  CHECK_EQ(g_allocations - before, 0u);
  CHECK(ok);
}

TEST(an_execution_that_fails_says_why) {
  Fake fake;
  auto context = ExecutableContext::load(fake.backend(), kBinary, sizeof kBinary).value();
  Status status = context->graph("bad").value()->execute(nullptr, 0, nullptr, 0);
  CHECK_EQ(status.code(), 6031u);
  CHECK_CONTAINS(status.message(), "executing graph bad");
  CHECK_CONTAINS(status.message(), "execution went wrong");
}

TEST(an_executable_graph_keeps_its_context) {
  Fake fake;
  {
    auto graph =
        ExecutableContext::load(fake.backend(), kBinary, sizeof kBinary).value()->graph("good");
    CHECK_EQ(fake.journal(), "LBDC");
  }
  CHECK_EQ(fake.journal(), "LBDCcdbl");
}

TEST(a_context_that_qnn_refuses_names_both_versions) {
  Fake fake;
  Status status = ExecutableContext::load(fake.backend(), "O", 1).status();
  CHECK_EQ(status.code(), 5000u);
  CHECK_CONTAINS(status.message(), "compiled by QAIRT v2.fake with the library of QAIRT v2.fake");
  CHECK_CONTAINS(status.message(), "the same");
  CHECK(!ExecutableContext::load(fake.backend(), kBinary, 100).value()->graph("no").ok());
}

TEST_MAIN()
