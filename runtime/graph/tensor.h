// SPDX-License-Identifier: BSD-3-Clause
// Tensors as values: they own what QNN's structs only point to, and hand out such a struct when a
// call needs one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/api.h"
#include "core/status.h"
#include "qnn/abi.h"

namespace executorch_qnn {

// Bytes per element; 0 for a type we do not know.
ETQNN_API size_t element_size(abi::DataType dtype);

// How the integers of a quantized tensor stand for real numbers: real = (q + offset) * scale.
struct ETQNN_API Encoding {
  abi::EncodingKind kind = abi::EncodingKind::kUndefined;
  int32_t axis = 0;   // per-axis kinds
  uint32_t bits = 0;  // bit-width kinds: of the value; blockwise: of the block scales
  // One for per-tensor kinds, one per channel for per-axis kinds.
  std::vector<float> scales;
  std::vector<int32_t> offsets;
  // Blockwise: factors of the channel scales, channel-major.
  uint32_t blocks_per_axis = 0;
  std::vector<uint8_t> block_scales;

  static Encoding scale_offset(float scale, int32_t offset);
  // Copies out of QNN's struct.
  static Encoding from(const abi::QuantizeParams& params);
  // Whether the lists have the lengths that the kind and `dims` ask for.
  Status check(const std::vector<uint32_t>& dims) const;
};

// A tensor without data.
struct ETQNN_API TensorSpec {
  std::string name;
  abi::TensorKind kind = abi::TensorKind::kNative;
  abi::DataType dtype = abi::DataType::kFloat16;
  std::vector<uint32_t> dims;
  Encoding encoding;
  uint32_t id = 0;  // known once QNN has made it

  uint64_t element_count() const;
  uint64_t bytes() const { return element_count() * element_size(dtype); }
  // Copies out of QNN's struct.
  static TensorSpec from(const abi::Tensor& tensor);
};

// A tensor that can be handed to QNN. It stays where it is: QNN copies data, dimensions and scales
// when it creates a tensor, but of a blockwise encoding it keeps the pointer.
class ETQNN_API Tensor {
 public:
  // `data`, for a static tensor, is `spec.bytes()` bytes that are borrowed.
  explicit Tensor(TensorSpec spec, const void* data = nullptr);
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  const TensorSpec& spec() const { return spec_; }
  void set_id(uint32_t id) { spec_.id = id; }

  // Ends the loan of the data. What is as small as a parameter (a permutation, ranges, axes) is
  // copied first: QNN's validators read it again with each node.
  void return_data();

  // QNN's struct; points into this object.
  abi::Tensor view();

 private:
  TensorSpec spec_;
  const void* data_;
  std::vector<uint8_t> parameter_;               // what data_ points to after return_data()
  std::vector<abi::ScaleOffset> scale_offsets_;  // the interleaved form some encodings want
  abi::BlockwiseExpansion blockwise_{};
};

}  // namespace executorch_qnn
