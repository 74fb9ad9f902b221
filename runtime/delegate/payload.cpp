// SPDX-License-Identifier: BSD-3-Clause
#include "delegate/payload.h"

#include <cmath>
#include <cstring>
#include <set>

#include "core/byte_reader.h"

namespace executorch_qnn {
namespace {

constexpr char kMagic[8] = {'E', 'T', 'Q', 'N', 'N', 'D', 'L', 'G'};
constexpr uint16_t kMajor = 2;
constexpr size_t kHeaderBytes = 32;
constexpr size_t kCrcStart = 16;
constexpr uint32_t kMaxRank = 16;

// The fewest bytes a record can take, for counts to be checked against.
constexpr size_t kMinTensorBytes = 7 * sizeof(uint32_t);
constexpr size_t kMinStateBytes = 10 * sizeof(uint32_t);

enum EncodingKind : uint32_t { kNoEncoding = 0, kScaleOffset = 1 };
enum InitialKind : uint32_t { kZeros = 0, kNamedData = 1 };

Status damaged(const std::string& what) {
  return {ErrorKind::kInvalid, "the delegate payload is damaged: " + what};
}

Status newer(const std::string& what) {
  return {ErrorKind::kIncompatible,
          "the delegate payload is of a newer kind (" + what + "); upgrade executorch-qnn"};
}

class Parser {
 public:
  Parser(const void* data, size_t size) : in_(data, size) {}

  Result<Payload> parse(bool may_have_more) {
    Payload p;
    p.method = in_.text();
    p.graph = in_.text();
    p.context_key = in_.text();
    if (const uint8_t* digest = in_.bytes(p.context_digest.size())) {
      std::memcpy(p.context_digest.data(), digest, p.context_digest.size());
    }
    p.context_size = in_.number<uint64_t>();
    p.build_id = in_.text();
    p.core_major = in_.number<uint32_t>();
    p.core_minor = in_.number<uint32_t>();
    p.soc_model = in_.number<uint32_t>();
    p.htp_arch = in_.number<uint32_t>();
    p.target = in_.text();
    p.inputs.resize(in_.count(kMinTensorBytes));
    for (PayloadTensor& tensor : p.inputs) ETQNN_TRY(read(tensor));
    p.outputs.resize(in_.count(kMinTensorBytes));
    for (PayloadTensor& tensor : p.outputs) ETQNN_TRY(read(tensor));
    p.states.resize(in_.count(kMinStateBytes));
    for (PayloadState& state : p.states) ETQNN_TRY(read(state));
    if (!in_.ok()) return damaged("it ends too early");
    if (in_.remaining() > 0 && !may_have_more) return damaged("it holds more than it should");
    ETQNN_TRY(check(p));
    return p;
  }

 private:
  std::vector<uint32_t> read_dims() {
    std::vector<uint32_t> dims(in_.count(sizeof(uint32_t)));
    for (uint32_t& dim : dims) dim = in_.number<uint32_t>();
    return dims;
  }

  Status read(TensorEncoding& encoding) {
    const auto kind = in_.number<uint32_t>();
    if (kind == kScaleOffset) {
      encoding.quantized = true;
      encoding.scale = in_.number<float>();
      encoding.offset = in_.number<int32_t>();
    } else if (kind != kNoEncoding) {
      return newer("encoding " + std::to_string(kind));
    }
    return {};
  }

  static Result<Converter> converter_of(const std::string& name, ScalarType host, abi::DataType npu,
                                        const TensorEncoding& encoding) {
    if (!encoding.valid() || (is_quantized(host, npu) && !encoding.quantized)) {
      return damaged("encoding of " + name);
    }
    const auto found = converter(host, npu, encoding);
    if (!found) return newer("element types of " + name);
    return *found;
  }

  Status read(PayloadTensor& tensor) {
    tensor.tensor = in_.text();
    tensor.host_type = static_cast<ScalarType>(in_.number<int32_t>());
    tensor.npu_type = static_cast<abi::DataType>(in_.number<uint32_t>());
    tensor.dims = read_dims();
    tensor.npu_dims = read_dims();
    ETQNN_TRY(read(tensor.encoding));
    const auto flags = in_.number<uint32_t>();
    if (!in_.ok()) return damaged("it ends too early");
    if (flags != 0) return newer("tensor flags " + std::to_string(flags));
    const auto elements = element_count(tensor.dims);
    if (tensor.dims.size() > kMaxRank || !elements) return damaged("shape of " + tensor.tensor);
    if (tensor.tensor.empty() && element_bytes(tensor.host_type) > 0) return {};
    const std::string name = "tensor " + tensor.tensor;
    ETQNN_ASSIGN(tensor.converter,
                 converter_of(name, tensor.host_type, tensor.npu_type, tensor.encoding));
    if (element_count(tensor.npu_dims) != elements) {
      return damaged(name + " changes size on its way");
    }
    return {};
  }

  Status read(PayloadState& state) {
    StateDescriptor& d = state.descriptor;
    d.name = in_.text();
    d.host_type = static_cast<ScalarType>(in_.number<int32_t>());
    d.stored_type = static_cast<abi::DataType>(in_.number<uint32_t>());
    state.npu_type = static_cast<abi::DataType>(in_.number<uint32_t>());
    d.dims = read_dims();
    ETQNN_TRY(read(d.encoding));
    state.input = in_.text();
    state.output = in_.text();
    const auto binding = in_.number<uint32_t>();
    const auto initial = in_.number<uint32_t>();
    if (initial == kNamedData) state.initial_key = in_.text();
    if (binding == static_cast<uint32_t>(StateBinding::kDelta)) read(state.rows);
    if (binding == static_cast<uint32_t>(StateBinding::kAccumulate)) {
      state.scale = in_.number<float>();
    }
    if (!in_.ok()) return damaged("it ends too early");
    if (initial > kNamedData) return newer("initial value " + std::to_string(initial));
    if (binding > static_cast<uint32_t>(StateBinding::kCopied)) {
      return newer("state binding " + std::to_string(binding));
    }
    state.binding = static_cast<StateBinding>(binding);
    if (d.name.empty() || d.dims.size() > kMaxRank || !element_count(d.dims)) {
      return damaged("buffer " + d.name);
    }
    if (initial == kNamedData && state.initial_key.empty()) return damaged("buffer " + d.name);
    ETQNN_TRY(converter_of("buffer " + d.name, d.host_type, d.stored_type, d.encoding).status());
    if (!fits(state)) {
      return damaged("buffer " + d.name + " is bound as " + to_string(state.binding) +
                     ", which its tensors do not fit");
    }
    return {};
  }

  void read(PayloadRows& rows) {
    rows.positions = in_.text();
    rows.offset = in_.number<uint64_t>();
    rows.outer = in_.number<uint32_t>();
    rows.length = in_.number<uint32_t>();
    rows.row = in_.number<uint32_t>();
    rows.count = in_.number<uint32_t>();
  }

  // Whether tensors and types are what the binding needs.
  static bool fits(const PayloadState& state) {
    const StateDescriptor& d = state.descriptor;
    const bool reads = !state.input.empty();
    const bool writes = !state.output.empty();
    const bool converted = state.npu_type != d.stored_type;
    if (converted &&
        (d.stored_type != abi::DataType::kFloat32 || state.npu_type != abi::DataType::kFloat16)) {
      return false;
    }
    switch (state.binding) {
      case StateBinding::kInPlace:
      case StateBinding::kDoubleBuffer:
        return reads && writes && !converted;
      case StateBinding::kReadOnly:
        return reads && !writes;
      case StateBinding::kWriteOnly:
        return writes && !reads;
      case StateBinding::kDelta: {
        const PayloadRows& r = state.rows;
        const auto elements = element_count({r.outer, r.length, r.row});
        return writes && !converted && !r.positions.empty() && r.count > 0 && elements &&
               *elements == d.elements();
      }
      case StateBinding::kAccumulate:
        return writes && converted && std::isnormal(state.scale);
      case StateBinding::kCopied:
        return reads && writes && converted;
    }
    return false;
  }

  static Status check(const Payload& p) {
    if (p.graph.empty() || p.context_key.empty() || p.context_size == 0) {
      return damaged("it names no graph");
    }
    std::set<std::string> names;
    for (const PayloadState& state : p.states) {
      if (!names.insert(state.descriptor.name).second) {
        return damaged("buffer " + state.descriptor.name + " appears twice");
      }
    }
    for (const PayloadTensor& output : p.outputs) {
      if (output.tensor.empty()) return damaged("an output without a tensor");
    }
    return {};
  }

  ByteReader in_;
};

}  // namespace

size_t PayloadTensor::elements() const {
  size_t count = 1;
  for (uint32_t dim : dims) count *= dim;
  return count;
}

Result<Payload> parse_payload(const void* data, size_t size) {
  if (data == nullptr || size < kHeaderBytes) return damaged("truncated header");
  const auto* start = static_cast<const uint8_t*>(data);
  ByteReader header(data, size);
  if (std::memcmp(header.bytes(sizeof kMagic), kMagic, sizeof kMagic) != 0) {
    return damaged("it does not begin with " + std::string(kMagic, sizeof kMagic));
  }
  const auto major = header.number<uint16_t>();
  const auto minor = header.number<uint16_t>();
  const auto crc = header.number<uint32_t>();
  const auto total = header.number<uint64_t>();
  if (major != kMajor) {
    return newer("format " + std::to_string(major) + "." + std::to_string(minor) +
                 ", this version reads " + std::to_string(kMajor) + ".x");
  }
  if (total > size || total < kHeaderBytes) {
    return damaged("truncated: " + std::to_string(size) + " of " + std::to_string(total) +
                   " bytes");
  }
  if (crc != crc32(start + kCrcStart, total - kCrcStart)) return damaged("checksum");
  // A later minor version appends fields: what lies behind those we know is its business.
  return Parser(start + kHeaderBytes, total - kHeaderBytes).parse(minor > 0);
}

}  // namespace executorch_qnn
