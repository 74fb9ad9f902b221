// SPDX-License-Identifier: BSD-3-Clause
#include "graph/builder.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

#include "core/file.h"
#include "core/stdout_capture.h"

namespace executorch_qnn {
namespace {

// ------------------------------------------------------------------------------------- nodes

abi::Scalar to_scalar(const ScalarParam& param) {
  abi::Scalar scalar{};
  scalar.dtype = param.dtype;
  if (param.dtype == abi::DataType::kFloat32) {
    scalar.f32 = std::visit([](auto value) { return static_cast<float>(value); }, param.value);
    return scalar;
  }
  // Little endian: the low bytes are those of every narrower member of the union.
  scalar.i64 = std::visit([](auto value) { return static_cast<int64_t>(value); }, param.value);
  return scalar;
}

// An op as QNN wants it: one block of structs that point into `tensors` and into the node.
class OpView {
 public:
  static Result<OpView> make(std::deque<Tensor>& tensors, const NodeSpec& node) {
    OpView view(node);
    auto resolve = [&](uint32_t index, std::vector<abi::Tensor>& list) -> Status {
      if (index >= tensors.size()) {
        return {ErrorKind::kInvalid, "node " + node.name + " names tensor " +
                                         std::to_string(index) + " of " +
                                         std::to_string(tensors.size())};
      }
      list.push_back(tensors[index].view());
      return {};
    };
    for (uint32_t index : node.inputs) ETQNN_TRY(resolve(index, view.inputs_));
    for (uint32_t index : node.outputs) ETQNN_TRY(resolve(index, view.outputs_));
    for (const NodeSpec::Param& param : node.params) {
      abi::Param& entry = view.params_.emplace_back();
      entry.name = param.name.c_str();
      if (const auto* scalar = std::get_if<ScalarParam>(&param.value)) {
        entry.kind = abi::ParamKind::kScalar;
        entry.scalar = to_scalar(*scalar);
      } else {
        std::vector<abi::Tensor> tensor;
        ETQNN_TRY(resolve(std::get<uint32_t>(param.value), tensor));
        entry.kind = abi::ParamKind::kTensor;
        entry.tensor = tensor[0];
      }
    }
    return view;
  }

  abi::OpConfig config() {
    abi::OpConfig config{};
    config.version = 1;
    config.v1 = {node_->name.c_str(), abi::kOpPackage,
                 node_->type.c_str(), static_cast<uint32_t>(params_.size()),
                 params_.data(),      static_cast<uint32_t>(inputs_.size()),
                 inputs_.data(),      static_cast<uint32_t>(outputs_.size()),
                 outputs_.data()};
    return config;
  }

 private:
  explicit OpView(const NodeSpec& node) : node_(&node) {
    inputs_.reserve(node.inputs.size());
    outputs_.reserve(node.outputs.size());
    params_.reserve(node.params.size());
  }

  const NodeSpec* node_;
  std::vector<abi::Tensor> inputs_, outputs_;
  std::vector<abi::Param> params_;
};

Status check_spec(const TensorSpec& spec) {
  if (element_size(spec.dtype) == 0) {
    return {ErrorKind::kInvalid, "tensor " + spec.name + " has unknown element type " +
                                     std::to_string(static_cast<uint32_t>(spec.dtype))};
  }
  Status encoding = spec.encoding.check(spec.dims);
  if (encoding.ok()) return {};
  return {encoding.kind(), "tensor " + spec.name + ": " + encoding.message()};
}

// ------------------------------------------------------------------------------------- options

// A list of configurations in the form that create functions take.
template <class HtpConfig>
class ConfigList {
 public:
  HtpConfig& add() { return htp_.emplace_back(); }

  const abi::Config* const* get() {
    if (htp_.empty()) return nullptr;
    configs_.clear();
    for (const HtpConfig& htp : htp_) {
      abi::Config& config = configs_.emplace_back();
      config.option = abi::kConfigCustom;
      config.custom = &htp;
    }
    pointers_.clear();
    for (const abi::Config& config : configs_) pointers_.push_back(&config);
    pointers_.push_back(nullptr);
    return pointers_.data();
  }

 private:
  std::vector<HtpConfig> htp_;
  std::vector<abi::Config> configs_;
  std::vector<const abi::Config*> pointers_;
};

ConfigList<abi::HtpGraphConfig> to_configs(const GraphOptions& options) {
  ConfigList<abi::HtpGraphConfig> list;
  auto add = [&list](abi::HtpGraphOption option) -> abi::HtpGraphConfig& {
    abi::HtpGraphConfig& config = list.add();
    config.option = option;
    return config;
  };
  if (options.float16) add(abi::HtpGraphOption::kPrecision).u32 = abi::kPrecisionFloat16;
  if (options.vtcm_megabytes) {
    add(abi::HtpGraphOption::kVtcmMegabytes).u32 = *options.vtcm_megabytes;
  }
  if (options.optimization_level != 0) {
    auto& config = add(abi::HtpGraphOption::kOptimization);
    config.optimization = {abi::kOptimizationLevel, static_cast<float>(options.optimization_level)};
  }
  if (options.hvx_threads != 0) add(abi::HtpGraphOption::kHvxThreads).u64 = options.hvx_threads;
  if (options.share_io) add(abi::HtpGraphOption::kShareIo).flag = 1;
  return list;
}

}  // namespace

// ------------------------------------------------------------------------------------- DDR traffic

DdrTraffic parse_ddr_summary(const std::string& text) {
  size_t summary = text.find("DDR bandwidth summary");
  auto value = [&](const char* key) -> uint64_t {
    size_t begin = summary == std::string::npos ? summary : text.find(key, summary);
    if (begin == std::string::npos) return 0;
    return std::strtoull(text.c_str() + begin + std::strlen(key), nullptr, 10);
  };
  return {value("read_total_bytes="), value("write_total_bytes="), value("spill_bytes="),
          value("fill_bytes=")};
}

// ------------------------------------------------------------------------------------- validation

Status validate_op(const Backend& backend, const std::vector<TensorSpec>& tensors,
                   const std::vector<const void*>& data, const NodeSpec& node) {
  std::deque<Tensor> owned;
  for (size_t i = 0; i < tensors.size(); ++i) {
    ETQNN_TRY(check_spec(tensors[i]));
    owned.emplace_back(tensors[i], data[i]);
  }
  ETQNN_ASSIGN(OpView view, OpView::make(owned, node));
  return backend.validate(view.config());
}

// ------------------------------------------------------------------------------------- context

Result<std::shared_ptr<ContextBuilder>> ContextBuilder::create(
    std::shared_ptr<const Backend> backend, const ContextOptions& options) {
  std::shared_ptr<ContextBuilder> context(new ContextBuilder(std::move(backend)));
  ConfigList<abi::HtpContextConfig> configs;
  if (options.share_weights) {
    abi::HtpContextConfig& config = configs.add();
    config.option = abi::HtpContextOption::kWeightSharing;
    config.flag = 1;
  }
  LogCapture log;
  abi::Error error = context->api().context_create(
      context->backend_->handle(), context->backend_->device(), configs.get(), &context->handle_);
  ETQNN_TRY(context->library().check(error, "creating a QNN context", log));
  return context;
}

ContextBuilder::~ContextBuilder() {
  if (handle_ != nullptr) api().context_free(handle_, nullptr);
}

Result<std::shared_ptr<GraphBuilder>> ContextBuilder::create_graph(const std::string& name,
                                                                   const GraphOptions& options) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<GraphBuilder> graph(new GraphBuilder(shared_from_this(), name));
  ConfigList<abi::HtpGraphConfig> configs = to_configs(options);
  LogCapture log;
  abi::Error error = api().graph_create(handle_, name.c_str(), configs.get(), &graph->handle_);
  ETQNN_TRY(library().check(error, ("creating graph " + name).c_str(), log));
  ++unfinished_graphs_;
  return graph;
}

Result<uint64_t> ContextBuilder::binary_size() {
  if (unfinished_graphs_ > 0) {
    return Status(ErrorKind::kInvalid, "the context has " + std::to_string(unfinished_graphs_) +
                                           " graphs that are not finalized");
  }
  LogCapture log;
  uint64_t size = 0;
  abi::Error error = api().context_get_binary_size(handle_, &size);
  ETQNN_TRY(library().check(error, "asking for the size of the context binary", log));
  return size;
}

Result<uint64_t> ContextBuilder::copy_binary(void* buffer, uint64_t capacity) {
  LogCapture log;
  StdoutCapture quiet;
  uint64_t written = 0;
  abi::Error error = api().context_get_binary(handle_, buffer, capacity, &written);
  ETQNN_TRY(library().check(error, "serialising the context", log));
  if (written > capacity) return Status(ErrorKind::kQnn, "the context binary overran its buffer");
  return written;
}

Result<uint64_t> ContextBuilder::write_binary(const std::string& path) {
  std::lock_guard<std::mutex> lock(mutex_);
  ETQNN_ASSIGN(uint64_t capacity, binary_size());
  ETQNN_ASSIGN(OutputFile file, OutputFile::create(path, capacity));
  uint64_t written = 0;
  {
    // QNN holds two copies of the weights at this point; this must not become a third one.
    WriteBehind to_file(file.data(), capacity);
    ETQNN_ASSIGN(written, copy_binary(file.data(), capacity));
  }
  ETQNN_TRY(file.commit(written));
  return written;
}

Result<std::vector<uint8_t>> ContextBuilder::binary() {
  std::lock_guard<std::mutex> lock(mutex_);
  ETQNN_ASSIGN(uint64_t capacity, binary_size());
  std::vector<uint8_t> buffer(capacity);
  ETQNN_ASSIGN(uint64_t written, copy_binary(buffer.data(), capacity));
  buffer.resize(written);
  return buffer;
}

// ------------------------------------------------------------------------------------- graph

Status GraphBuilder::check_open() const {
  if (!finalized_) return {};
  return {ErrorKind::kInvalid, "graph " + name_ + " is finalized"};
}

Result<uint32_t> GraphBuilder::add_tensor(TensorSpec spec, const void* data, uint64_t size) {
  std::lock_guard<std::mutex> lock(context_->mutex_);
  ETQNN_TRY(check_open());
  ETQNN_TRY(check_spec(spec));
  bool is_static = spec.kind == abi::TensorKind::kStatic;
  if (is_static != (data != nullptr)) {
    return Status(ErrorKind::kInvalid,
                  "tensor " + spec.name + (is_static ? " has no data" : " takes no data"));
  }
  if (is_static && size != spec.bytes()) {
    return Status(ErrorKind::kInvalid, "tensor " + spec.name + " has " + std::to_string(size) +
                                           " bytes of data for " + std::to_string(spec.bytes()));
  }
  if (size > std::numeric_limits<uint32_t>::max()) {
    return Status(ErrorKind::kInvalid, "tensor " + spec.name + " is larger than 4 GiB");
  }
  Tensor& tensor = tensors_.emplace_back(std::move(spec), data);
  abi::Tensor view = tensor.view();
  LogCapture log;
  abi::Error error = context_->api().tensor_create_graph_tensor(handle_, &view);
  std::string action = "creating tensor " + tensor.spec().name;
  if (error != 0) tensors_.pop_back();
  ETQNN_TRY(context_->library().check(error, action.c_str(), log));
  tensor.set_id(view.v1.id);
  tensor.return_data();
  return static_cast<uint32_t>(tensors_.size() - 1);
}

Status GraphBuilder::add_node(const NodeSpec& node) {
  std::lock_guard<std::mutex> lock(context_->mutex_);
  ETQNN_TRY(check_open());
  ETQNN_ASSIGN(OpView view, OpView::make(tensors_, node));
  ETQNN_TRY(context_->backend_->validate(view.config()));
  LogCapture log;
  abi::Error error = context_->api().graph_add_node(handle_, view.config());
  std::string action = "adding op " + node.name + " (" + node.type + ")";
  return context_->library().check(error, action.c_str(), log);
}

Result<FinalizeReport> GraphBuilder::finalize() {
  std::lock_guard<std::mutex> lock(context_->mutex_);
  ETQNN_TRY(check_open());
  FinalizeReport report;
  LogCapture log;
  Backend::Verbose verbose(*context_->backend_);
  StdoutCapture output;
  auto begin = std::chrono::steady_clock::now();
  abi::Error error = context_->api().graph_finalize(handle_, nullptr, nullptr);
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  report.log = output.finish() + log.progress();
  ETQNN_TRY(context_->library().check(error, ("compiling graph " + name_).c_str(), log));
  report.ddr = parse_ddr_summary(report.log);
  finalized_ = true;
  --context_->unfinished_graphs_;
  return report;
}

}  // namespace executorch_qnn
