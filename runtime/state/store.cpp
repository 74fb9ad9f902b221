// SPDX-License-Identifier: BSD-3-Clause
#include "state/store.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

namespace executorch_qnn {
namespace {

// Calls `visit` with a zero of the integer type that `type` stores. False if it is none.
template <class Visit>
bool with_integer(abi::DataType type, const Visit& visit) {
  switch (type) {
    case abi::DataType::kUFixed8:
      visit(uint8_t{});
      return true;
    case abi::DataType::kSFixed8:
      visit(int8_t{});
      return true;
    case abi::DataType::kUFixed16:
      visit(uint16_t{});
      return true;
    case abi::DataType::kSFixed16:
      visit(int16_t{});
      return true;
    default:
      return false;
  }
}

// Whether the host sees floats and the slot holds integers.
bool is_quantized(const StateDescriptor& d) {
  return d.encoding.quantized && d.host_type == ScalarType::kFloat32 &&
         with_integer(d.stored_type, [](auto) {});
}

void dequantize(const StateDescriptor& d, const void* stored, float* host) {
  with_integer(d.stored_type, [&](auto zero) {
    const auto* from = static_cast<const decltype(zero)*>(stored);
    for (size_t i = 0; i < d.elements(); ++i) {
      host[i] = static_cast<float>(from[i] + d.encoding.offset) * d.encoding.scale;
    }
  });
}

// To the nearest, ties to even, what is out of range to the end of it: as PyTorch does. A value
// that came from dequantize() gets its bits back.
Status quantize(const StateDescriptor& d, const float* host, void* stored) {
  for (size_t i = 0; i < d.elements(); ++i) {  // before a byte changes
    if (std::isnan(host[i])) {
      return {ErrorKind::kState, "buffer " + d.describe() + " cannot hold NaN"};
    }
  }
  with_integer(d.stored_type, [&](auto zero) {
    using Integer = decltype(zero);
    auto* to = static_cast<Integer*>(stored);
    const auto offset = static_cast<float>(d.encoding.offset);
    for (size_t i = 0; i < d.elements(); ++i) {
      const float q = std::nearbyint(host[i] / d.encoding.scale) - offset;
      to[i] = static_cast<Integer>(std::clamp<float>(q, std::numeric_limits<Integer>::min(),
                                                     std::numeric_limits<Integer>::max()));
    }
  });
  return {};
}

// What is said of a slot that graphs use in different ways: that of the one that does most to it. A
// reader and a writer together are as good as one graph that does both in place.
StateBinding stronger(StateBinding a, StateBinding b) {
  if (a == b) return a;
  const auto rank = [](StateBinding binding) {
    switch (binding) {
      case StateBinding::kReadOnly:
      case StateBinding::kWriteOnly:
        return 0;
      case StateBinding::kInPlace:
        return 1;
      case StateBinding::kDelta:
        return 2;
      case StateBinding::kCopied:
        return 3;
      case StateBinding::kAccumulate:
        return 4;
      case StateBinding::kDoubleBuffer:
        return 5;
    }
    return 0;
  };
  if (rank(a) == rank(b)) return StateBinding::kInPlace;
  return rank(a) > rank(b) ? a : b;
}

}  // namespace

const char* to_string(StateBinding binding) {
  switch (binding) {
    case StateBinding::kInPlace:
      return "in_place";
    case StateBinding::kDoubleBuffer:
      return "double_buffer";
    case StateBinding::kReadOnly:
      return "read_only";
    case StateBinding::kWriteOnly:
      return "write_only";
    case StateBinding::kDelta:
      return "delta";
    case StateBinding::kAccumulate:
      return "accumulate";
    case StateBinding::kCopied:
      return "copied";
  }
  return "unknown";
}

bool StateDescriptor::valid() const {
  if (is_quantized(*this)) return std::isnormal(encoding.scale) && encoding.scale > 0;
  return conversion(host_type, stored_type).has_value();
}

Status StateDescriptor::check_host_bytes(size_t size) const {
  if (size == host_bytes()) return {};
  return {ErrorKind::kState, "buffer " + describe() + " has " + std::to_string(host_bytes()) +
                                 " bytes, got " + std::to_string(size)};
}

size_t StateDescriptor::elements() const {
  size_t count = 1;
  for (uint32_t dim : dims) count *= dim;
  return count;
}

bool StateDescriptor::operator==(const StateDescriptor& other) const {
  return name == other.name && host_type == other.host_type && stored_type == other.stored_type &&
         dims == other.dims && encoding == other.encoding;
}

std::string StateDescriptor::describe() const {
  std::string text = name + ": " + executorch_qnn::describe(host_type, dims) + " stored as " +
                     to_string(stored_type);
  if (encoding.quantized) {
    text += " with scale " + std::to_string(encoding.scale) + " and offset " +
            std::to_string(encoding.offset);
  }
  return text;
}

Result<StateSlot*> StateStore::bind(const StateDescriptor& descriptor, StateBinding binding,
                                    const InitialValue& initial) {
  if (!descriptor.valid()) {
    return Status(ErrorKind::kState,
                  "buffer " + descriptor.describe() + ": types do not go together");
  }
  std::lock_guard<std::mutex> lock(mutex_);
  std::unique_ptr<StateSlot>& slot = slots_[descriptor.name];
  if (slot == nullptr) {
    auto made = std::make_unique<StateSlot>();
    made->descriptor_ = descriptor;
    made->initial_ = initial;
    made->binding_ = binding;
    auto region = Region::allocate(descriptor.stored_bytes());
    if (!region.ok()) {
      slots_.erase(descriptor.name);
      return region.status();
    }
    made->front_ = std::move(region).value();
    fill(*made);
    slot = std::move(made);
  } else {
    const InitialValue& known = slot->initial_;
    if (!(slot->descriptor_ == descriptor)) {
      return Status(ErrorKind::kState,
                    "buffer " + descriptor.name + " is declared twice and differently: " +
                        slot->descriptor_.describe() + "; " + descriptor.describe());
    }
    const bool same = known.data == initial.data ||
                      (known.data != nullptr && initial.data != nullptr &&
                       std::memcmp(known.data, initial.data, descriptor.stored_bytes()) == 0);
    if (!same) {
      return Status(ErrorKind::kState,
                    "buffer " + descriptor.name + " is declared with two initial values");
    }
    slot->binding_ = stronger(slot->binding_, binding);
  }
  if (binding == StateBinding::kDoubleBuffer && slot->back_.address() == nullptr) {
    // Not filled: a graph writes all of it before anybody reads it.
    ETQNN_ASSIGN(slot->back_, Region::allocate(descriptor.stored_bytes()));
  }
  return slot.get();
}

StateSlot* StateStore::find(const std::string& name) const {
  const auto found = slots_.find(name);
  return found == slots_.end() ? nullptr : found->second.get();
}

void StateStore::fill(StateSlot& slot) {
  if (slot.initial_.data == nullptr) {
    std::memset(slot.front_.address(), 0, slot.front_.size());
  } else {
    std::memcpy(slot.front_.address(), slot.initial_.data, slot.front_.size());
  }
  bytes_copied_ += slot.front_.size();
}

void StateStore::reset() {
  for (auto& entry : slots_) fill(*entry.second);
}

Result<std::shared_ptr<StateStore>> StateStore::fork() {
  auto twin = std::make_shared<StateStore>();
  for (const auto& entry : slots_) {
    const StateSlot& slot = *entry.second;
    auto copy = std::make_unique<StateSlot>();
    copy->descriptor_ = slot.descriptor_;
    copy->initial_ = slot.initial_;
    copy->binding_ = slot.binding_;
    ETQNN_ASSIGN(copy->front_, Region::allocate(slot.front_.size()));
    std::memcpy(copy->front_.address(), slot.front_.address(), slot.front_.size());
    twin->bytes_copied_ += slot.front_.size();
    if (slot.back_.address() != nullptr) {
      ETQNN_ASSIGN(copy->back_, Region::allocate(slot.back_.size()));
    }
    twin->slots_[entry.first] = std::move(copy);
  }
  return twin;
}

Status StateStore::read(const StateSlot& slot, void* host, size_t size) {
  const StateDescriptor& d = slot.descriptor_;
  ETQNN_TRY(d.check_host_bytes(size));
  if (is_quantized(d)) {
    dequantize(d, slot.front_.address(), static_cast<float*>(host));
  } else {
    to_host(*conversion(d.host_type, d.stored_type), slot.front_.address(), host, d.elements(),
            element_bytes(d.stored_type));
  }
  bytes_copied_ += d.stored_bytes();
  return {};
}

Status StateStore::write(StateSlot& slot, const void* host, size_t size) {
  const StateDescriptor& d = slot.descriptor_;
  ETQNN_TRY(d.check_host_bytes(size));
  if (is_quantized(d)) {
    ETQNN_TRY(quantize(d, static_cast<const float*>(host), slot.front_.address()));
    bytes_copied_ += d.stored_bytes();
    return {};
  }
  const Conversion how = *conversion(d.host_type, d.stored_type);
  if (how == Conversion::kInt64Int32) {
    // Checked before a byte changes.
    const auto* values = static_cast<const int64_t*>(host);
    for (size_t i = 0; i < d.elements(); ++i) {
      if (values[i] < INT32_MIN || values[i] > INT32_MAX) {
        return Status(ErrorKind::kState,
                      "buffer " + d.describe() + " cannot hold " + std::to_string(values[i]));
      }
    }
  }
  to_npu(how, host, slot.front_.address(), d.elements(), element_bytes(d.stored_type));
  bytes_copied_ += d.stored_bytes();
  return {};
}

}  // namespace executorch_qnn
