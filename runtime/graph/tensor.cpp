// SPDX-License-Identifier: BSD-3-Clause
#include "graph/tensor.h"

#include <utility>

namespace executorch_qnn {
namespace {

constexpr uint64_t kMaxParameterBytes = 4096;

}  // namespace

size_t element_size(abi::DataType dtype) {
  switch (dtype) {
    case abi::DataType::kInt8:
    case abi::DataType::kUint8:
    case abi::DataType::kSFixed8:
    case abi::DataType::kUFixed8:
    case abi::DataType::kBool8:
      return 1;
    case abi::DataType::kInt16:
    case abi::DataType::kUint16:
    case abi::DataType::kFloat16:
    case abi::DataType::kSFixed16:
    case abi::DataType::kUFixed16:
      return 2;
    case abi::DataType::kInt32:
    case abi::DataType::kUint32:
    case abi::DataType::kFloat32:
    case abi::DataType::kSFixed32:
    case abi::DataType::kUFixed32:
      return 4;
    case abi::DataType::kInt64:
    case abi::DataType::kUint64:
      return 8;
  }
  return 0;
}

// ------------------------------------------------------------------------------------- Encoding

Encoding Encoding::scale_offset(float scale, int32_t offset) {
  Encoding encoding;
  encoding.kind = abi::EncodingKind::kScaleOffset;
  encoding.scales = {scale};
  encoding.offsets = {offset};
  return encoding;
}

Encoding Encoding::from(const abi::QuantizeParams& params) {
  Encoding encoding;
  if (params.definition != abi::kEncodingDefined) return encoding;
  auto add = [&encoding](const abi::ScaleOffset& value) {
    encoding.scales.push_back(value.scale);
    encoding.offsets.push_back(value.offset);
  };
  switch (params.encoding) {
    case abi::EncodingKind::kScaleOffset:
      add(params.scale_offset);
      break;
    case abi::EncodingKind::kAxisScaleOffset:
      encoding.axis = params.axis.axis;
      for (uint32_t i = 0; i < params.axis.count; ++i) add(params.axis.values[i]);
      break;
    case abi::EncodingKind::kBitWidthScaleOffset:
      encoding.bits = params.bit_width.bits;
      add({params.bit_width.scale, params.bit_width.offset});
      break;
    case abi::EncodingKind::kBitWidthAxisScaleOffset:
      encoding.axis = params.bit_width_axis.axis;
      encoding.bits = params.bit_width_axis.bits;
      for (uint32_t i = 0; i < params.bit_width_axis.count; ++i) {
        const int32_t* offsets = params.bit_width_axis.offsets;
        add({params.bit_width_axis.scales[i], offsets != nullptr ? offsets[i] : 0});
      }
      break;
    default:  // blockwise encodings belong to weights, which are never read back
      return encoding;
  }
  encoding.kind = params.encoding;
  return encoding;
}

Status Encoding::check(const std::vector<uint32_t>& dims) const {
  if (kind == abi::EncodingKind::kUndefined) return {};
  bool per_axis =
      kind != abi::EncodingKind::kScaleOffset && kind != abi::EncodingKind::kBitWidthScaleOffset;
  if (per_axis && (axis < 0 || static_cast<size_t>(axis) >= dims.size())) {
    return {ErrorKind::kInvalid, "encoding axis " + std::to_string(axis) +
                                     " is not an axis of a tensor of rank " +
                                     std::to_string(dims.size())};
  }
  size_t channels = per_axis ? dims[static_cast<size_t>(axis)] : 1;
  if (scales.size() != channels || offsets.size() != channels) {
    return {ErrorKind::kInvalid, "encoding has " + std::to_string(scales.size()) + " scales and " +
                                     std::to_string(offsets.size()) + " offsets for " +
                                     std::to_string(channels) + " channels"};
  }
  if (kind == abi::EncodingKind::kBlockwiseExpansion &&
      block_scales.size() != channels * blocks_per_axis) {
    return {ErrorKind::kInvalid, "encoding has " + std::to_string(block_scales.size()) +
                                     " block scales for " + std::to_string(channels) +
                                     " channels of " + std::to_string(blocks_per_axis) + " blocks"};
  }
  return {};
}

// ------------------------------------------------------------------------------------- TensorSpec

uint64_t TensorSpec::element_count() const {
  uint64_t count = 1;
  for (uint32_t dim : dims) count *= dim;
  return count;
}

TensorSpec TensorSpec::from(const abi::Tensor& tensor) {
  const abi::TensorV1& v1 = tensor.v1;
  TensorSpec spec;
  if (v1.name != nullptr) spec.name = v1.name;
  spec.kind = v1.kind;
  spec.dtype = v1.dtype;
  if (v1.dims != nullptr) spec.dims.assign(v1.dims, v1.dims + v1.rank);
  spec.encoding = Encoding::from(v1.quantize);
  spec.id = v1.id;
  return spec;
}

// ------------------------------------------------------------------------------------- Tensor

Tensor::Tensor(TensorSpec spec, const void* data) : spec_(std::move(spec)), data_(data) {
  const Encoding& encoding = spec_.encoding;
  if (encoding.kind != abi::EncodingKind::kAxisScaleOffset &&
      encoding.kind != abi::EncodingKind::kBlockwiseExpansion) {
    return;
  }
  scale_offsets_.reserve(encoding.scales.size());
  for (size_t i = 0; i < encoding.scales.size(); ++i) {
    scale_offsets_.push_back({encoding.scales[i], encoding.offsets[i]});
  }
}

void Tensor::return_data() {
  if (data_ == nullptr) return;
  if (spec_.bytes() <= kMaxParameterBytes) {
    const auto* bytes = static_cast<const uint8_t*>(data_);
    parameter_.assign(bytes, bytes + spec_.bytes());
  }
  data_ = parameter_.empty() ? nullptr : parameter_.data();
}

abi::Tensor Tensor::view() {
  const Encoding& encoding = spec_.encoding;
  abi::Tensor tensor{};
  tensor.version = 1;
  abi::TensorV1& v1 = tensor.v1;
  v1.id = spec_.id;
  v1.name = spec_.name.c_str();
  v1.kind = spec_.kind;
  v1.dtype = spec_.dtype;
  v1.rank = static_cast<uint32_t>(spec_.dims.size());
  v1.dims = spec_.dims.data();
  v1.memory = abi::MemoryKind::kRaw;
  uint64_t size = data_ != nullptr ? spec_.bytes() : 0;
  v1.buffer = {const_cast<void*>(data_), static_cast<uint32_t>(size)};

  abi::QuantizeParams& params = v1.quantize;
  bool defined = encoding.kind != abi::EncodingKind::kUndefined;
  params.definition = defined ? abi::kEncodingDefined : abi::kEncodingUndefined;
  params.encoding = encoding.kind;
  auto channels = static_cast<uint32_t>(encoding.scales.size());
  switch (encoding.kind) {
    case abi::EncodingKind::kUndefined:
      break;
    case abi::EncodingKind::kScaleOffset:
      params.scale_offset = {encoding.scales[0], encoding.offsets[0]};
      break;
    case abi::EncodingKind::kAxisScaleOffset:
      params.axis = {encoding.axis, channels, scale_offsets_.data()};
      break;
    case abi::EncodingKind::kBitWidthScaleOffset:
      params.bit_width = {encoding.bits, encoding.scales[0], encoding.offsets[0]};
      break;
    case abi::EncodingKind::kBitWidthAxisScaleOffset:
      params.bit_width_axis = {encoding.bits, encoding.axis, channels, encoding.scales.data(),
                               encoding.offsets.data()};
      break;
    case abi::EncodingKind::kBlockwiseExpansion:
      blockwise_ = {encoding.axis,
                    scale_offsets_.data(),
                    encoding.blocks_per_axis,
                    encoding.bits,
                    0,
                    encoding.block_scales.data()};
      params.blockwise = &blockwise_;
      break;
  }
  return tensor;
}

}  // namespace executorch_qnn
