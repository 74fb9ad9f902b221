// SPDX-License-Identifier: BSD-3-Clause
// The part of libQnnSystem.so that describes a context binary, for contexts of null/format.h.
#include "null/format.h"

using namespace null_qnn;
using namespace executorch_qnn::abi;

namespace {

struct Description {
  std::unique_ptr<NullContext> content;
  std::vector<GraphInfo> graphs;
  BinaryInfo info{};
};

constexpr uint32_t kMeta[] = {1, 75};

Error get_metadata(Handle context, const void* binary, uint64_t size, const BinaryInfo** info) {
  auto* description = static_cast<Description*>(context);
  description->content = read_context(binary, size);
  if (description->content == nullptr) return 30002;
  for (const NullGraph& graph : description->content->graphs) {
    GraphInfo g{};
    g.version = 3;
    g.v3.v1 = {graph.name.c_str(), static_cast<uint32_t>(graph.input_structs.size()),
               graph.input_structs.data(), static_cast<uint32_t>(graph.output_structs.size()),
               graph.output_structs.data()};
    description->graphs.push_back(g);
  }
  BinaryInfoV3& v3 = description->info.v3;
  description->info.version = 3;
  v3.backend_id = kBackendHtp;
  v3.build_id = "v2.null";
  v3.core = {2, 40, 0};
  v3.n_graphs = static_cast<uint32_t>(description->graphs.size());
  v3.graphs = description->graphs.data();
  v3.meta_size = sizeof kMeta;
  v3.meta = kMeta;
  v3.soc_model = description->content->soc_model;
  *info = &description->info;
  return 0;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) Error
QnnSystemInterface_getProviders(const SystemProvider* const** providers, uint32_t* count) {
  static const SystemProvider kProvider{0,
                                        "SYSTEM_NULL",
                                        {1, 15, 0},
                                        {[](Handle* context) -> Error {
                                           *context = new Description;
                                           return 0;
                                         },
                                         nullptr, get_metadata,
                                         [](Handle context) -> Error {
                                           delete static_cast<Description*>(context);
                                           return 0;
                                         }}};
  static const SystemProvider* const kList = &kProvider;
  *providers = &kList;
  *count = 1;
  return 0;
}
