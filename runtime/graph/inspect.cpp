// SPDX-License-Identifier: BSD-3-Clause
#include "graph/inspect.h"

#include "qnn/discovery.h"

namespace executorch_qnn {
namespace {

constexpr uint32_t kBinaryInfoVersion = 3;

std::vector<TensorSpec> to_specs(const abi::Tensor* tensors, uint32_t count) {
  std::vector<TensorSpec> specs;
  specs.reserve(count);
  for (uint32_t i = 0; i < count; ++i) specs.push_back(TensorSpec::from(tensors[i]));
  return specs;
}

GraphDescription describe(const abi::GraphInfo& info) {
  const abi::GraphInfoV1& v1 = info.v3.v1;
  GraphDescription graph;
  if (v1.name != nullptr) graph.name = v1.name;
  graph.inputs = to_specs(v1.inputs, v1.n_inputs);
  graph.outputs = to_specs(v1.outputs, v1.n_outputs);
  if (info.version < 3 || info.v3.blob == nullptr) return graph;
  const auto& blob = *static_cast<const abi::HtpGraphBlob*>(info.v3.blob);
  if (info.v3.blob_size < offsetof(abi::HtpGraphBlob, v2) || blob.version != 1) return graph;
  graph.spill_fill_bytes = blob.spill_fill_bytes;
  graph.vtcm_bytes = blob.vtcm_bytes;
  graph.optimization_level = blob.optimization_level;
  graph.hvx_threads = blob.hvx_threads;
  if (info.v3.blob_size < sizeof blob || blob.v2.version != 2) return graph;
  graph.io_bytes = blob.v2.io_bytes;
  graph.op_bytes = blob.v2.op_bytes;
  graph.const_bytes = blob.v2.const_bytes;
  graph.ddr_bytes = blob.v2.ddr_bytes;
  graph.shared_weight_bytes = blob.v2.shared_weight_bytes;
  graph.safe_share_io = blob.v2.safe_share_io != 0;
  return graph;
}

ContextDescription describe(const abi::BinaryInfoV3& info) {
  ContextDescription context;
  if (info.build_id != nullptr) context.build_id = info.build_id;
  context.core_api = info.core;
  context.backend_api = info.backend;
  context.blob_version = info.blob_version;
  context.soc_model = info.soc_model;
  if (info.meta != nullptr && info.meta_size >= 2 * sizeof(uint32_t))
    context.dsp_arch = info.meta[1];
  for (uint32_t i = 0; i < info.n_graphs; ++i) context.graphs.push_back(describe(info.graphs[i]));
  return context;
}

// Frees the system context that owns the information.
class SystemContext {
 public:
  explicit SystemContext(const abi::SystemInterface& api) : api_(api) {}
  ~SystemContext() {
    if (handle_ != nullptr) api_.context_free(handle_);
  }
  SystemContext(const SystemContext&) = delete;
  SystemContext& operator=(const SystemContext&) = delete;

  abi::Error create() { return api_.context_create(&handle_); }
  abi::Handle handle() const { return handle_; }

 private:
  const abi::SystemInterface& api_;
  abi::Handle handle_ = nullptr;
};

}  // namespace

const GraphDescription* ContextDescription::find(const std::string& graph) const {
  for (const GraphDescription& description : graphs) {
    if (description.name == graph) return &description;
  }
  return nullptr;
}

Result<ContextDescription> inspect_context(const Library& library, const void* binary,
                                           uint64_t size) {
  if (library.system() == nullptr) {
    return Status(ErrorKind::kLibraryNotFound, library.folder() + " has no " + kSystemLibrary +
                                                   ", which reads context binaries");
  }
  LogCapture log;
  SystemContext context(*library.system());
  ETQNN_TRY(library.check(context.create(), "opening the QNN system interface", log));
  const abi::BinaryInfo* info = nullptr;
  abi::Error error = library.system()->context_get_metadata(context.handle(), binary, size, &info);
  ETQNN_TRY(library.check(error, "reading the context binary's description", log));
  if (info == nullptr || info->version != kBinaryInfoVersion) {
    return Status(ErrorKind::kIncompatible,
                  "the context binary's description has a version that is not known here");
  }
  if (info->v3.backend_id != abi::kBackendHtp) {
    return Status(ErrorKind::kIncompatible, "the context binary is not for the HTP backend");
  }
  return describe(info->v3);
}

}  // namespace executorch_qnn
