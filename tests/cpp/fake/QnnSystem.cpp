// SPDX-License-Identifier: BSD-3-Clause
// A stand-in for libQnnSystem.so: describes any binary as a context of two graphs, "good" and
// "bad", each with an input "x" and an output "y" of fp16 [2, 4]. A binary that starts with 'V' has
// a description of a version nobody knows; one with 'X' has none.
#include <cstring>

#include "qnn/abi.h"

#ifndef FAKE_SYSTEM_MAJOR
#define FAKE_SYSTEM_MAJOR 1
#endif

using namespace executorch_qnn::abi;

namespace {

Tensor make_tensor(uint32_t id, const char* name, TensorKind kind) {
  static const uint32_t kDims[] = {2, 4};
  Tensor tensor{};
  tensor.version = 1;
  tensor.v1.id = id;
  tensor.v1.name = name;
  tensor.v1.kind = kind;
  tensor.v1.dtype = DataType::kFloat16;
  tensor.v1.quantize = {};
  tensor.v1.quantize.definition = kEncodingUndefined;
  tensor.v1.rank = 2;
  tensor.v1.dims = kDims;
  return tensor;
}

const BinaryInfo& description() {
  static const Tensor input = make_tensor(11, "x", TensorKind::kInput);
  static const Tensor output = make_tensor(12, "y", TensorKind::kOutput);
  static HtpGraphBlob blob{};
  static GraphInfo graphs[2]{};
  static const uint32_t meta[] = {1, 75};
  static BinaryInfo info{};
  blob.version = 1;
  blob.spill_fill_bytes = 77;
  blob.vtcm_bytes = 8 << 20;
  blob.v2.version = 2;
  blob.v2.safe_share_io = 1;
  const char* const names[] = {"good", "bad"};
  for (int i = 0; i < 2; ++i) {
    graphs[i].version = 3;
    graphs[i].v3 = {{names[i], 1, &input, 1, &output}, 0, nullptr, sizeof blob, &blob, 0, 0};
  }
  info.version = 3;
  info.v3 = {6,       "v2.fake", {2, 36, 0}, {5, 47, 0}, nullptr,     {3, 3, 4}, 100, 0,
             nullptr, 2,         graphs,     nullptr,    sizeof meta, meta,      57};
  return info;
}

int g_context;

Error context_create(Handle* context) {
  *context = &g_context;
  return 0;
}

Error get_metadata(Handle, const void* binary, uint64_t, const BinaryInfo** info) {
  static const BinaryInfo kUnknown{4, {}};
  char first = *static_cast<const char*>(binary);
  if (first == 'X') return 30002;
  *info = first == 'V' ? &kUnknown : &description();
  return 0;
}

Error context_free(Handle) { return 0; }

}  // namespace

extern "C" __attribute__((visibility("default"))) Error
QnnSystemInterface_getProviders(const SystemProvider* const** providers, uint32_t* count) {
  static const SystemProvider kProvider{0,
                                        "SYSTEM_FAKE",
                                        {FAKE_SYSTEM_MAJOR, 15, 0},
                                        {context_create, nullptr, get_metadata, context_free}};
  static const SystemProvider* const kList = &kProvider;
  *providers = &kList;
  *count = 1;
  return 0;
}
