// SPDX-License-Identifier: BSD-3-Clause
// The "context binary" of the null provider, and how its two libraries read it.
//
// Little endian, packed, str = u32 length and bytes:
//   char[8] "NULLQNN1"; u32 SoC; u32 number of graphs, and for each:
//   str name; u32 behaviour; u32 number of inputs; tensors; u32 number of outputs; tensors
//   tensor = str name; u32 id; u32 type; u32 rank; u32 dims[]; u32 quantized and if it is 1,
//            float scale; i32 offset
#pragma once

#include <cstring>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "core/byte_reader.h"
#include "qnn/abi.h"

namespace null_qnn {

namespace abi = executorch_qnn::abi;

enum Behaviour : uint32_t {
  kNothing = 0,
  kFail = 1,
  // Output i is input i with one added to its first byte, for each i that both sides have and whose
  // sizes agree; what is left of the outputs stays as it is.
  kStep = 2,
  kSleep = 3,  // takes a millisecond, then as kStep
};

struct NullTensor {
  std::string name;
  std::vector<uint32_t> dims;
  abi::Tensor tensor{};
  size_t bytes = 0;
};

struct NullGraph {
  std::string name;
  uint32_t behaviour = kNothing;
  std::vector<NullTensor> inputs, outputs;
  // QNN's view of the two.
  std::vector<abi::Tensor> input_structs, output_structs;
};

struct NullContext {
  uint32_t soc_model = 0;
  std::list<NullGraph> graphs;
};

inline std::vector<NullTensor> read_tensors(executorch_qnn::ByteReader& in, abi::TensorKind kind,
                                            std::vector<abi::Tensor>& structs) {
  std::vector<NullTensor> tensors(in.count(16));
  for (NullTensor& t : tensors) {
    t.name = in.text();
    abi::TensorV1& v1 = t.tensor.v1;
    v1.id = in.number<uint32_t>();
    v1.dtype = static_cast<abi::DataType>(in.number<uint32_t>());
    t.dims.resize(in.count(4));
    const uint32_t width = static_cast<uint32_t>(v1.dtype) & 0xFF;
    t.bytes = width == 0x64 ? 8 : width == 0x32 ? 4 : width == 0x16 ? 2 : 1;
    for (uint32_t& dim : t.dims) t.bytes *= dim = in.number<uint32_t>();
    v1.quantize.definition = abi::kEncodingUndefined;
    v1.quantize.encoding = abi::EncodingKind::kUndefined;
    if (in.number<uint32_t>() == 1) {
      v1.quantize.definition = abi::kEncodingDefined;
      v1.quantize.encoding = abi::EncodingKind::kScaleOffset;
      v1.quantize.scale_offset.scale = in.number<float>();
      v1.quantize.scale_offset.offset = in.number<int32_t>();
    }
    t.tensor.version = 1;
    v1.name = t.name.c_str();
    v1.kind = kind;
    v1.rank = static_cast<uint32_t>(t.dims.size());
    v1.dims = t.dims.data();
  }
  for (const NullTensor& t : tensors) structs.push_back(t.tensor);
  return tensors;
}

// Null for anything that is not such a binary.
inline std::unique_ptr<NullContext> read_context(const void* data, size_t size) {
  executorch_qnn::ByteReader in(data, size);
  const uint8_t* magic = in.bytes(8);
  if (magic == nullptr || std::memcmp(magic, "NULLQNN1", 8) != 0) return nullptr;
  auto context = std::make_unique<NullContext>();
  context->soc_model = in.number<uint32_t>();
  const uint32_t count = in.count(16);
  for (uint32_t i = 0; i < count; ++i) {
    NullGraph& graph = context->graphs.emplace_back();
    graph.name = in.text();
    graph.behaviour = in.number<uint32_t>();
    graph.inputs = read_tensors(in, abi::TensorKind::kInput, graph.input_structs);
    graph.outputs = read_tensors(in, abi::TensorKind::kOutput, graph.output_structs);
  }
  return in.ok() ? std::move(context) : nullptr;
}

}  // namespace null_qnn
