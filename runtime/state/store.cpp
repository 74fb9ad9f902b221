// SPDX-License-Identifier: BSD-3-Clause
#include "state/store.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

namespace executorch_qnn {
namespace {

bool has_nan(ScalarType type, const void* values, size_t count) {
  const auto any = [count](const auto* from, const auto& is_nan) {
    return std::any_of(from, from + count, is_nan);
  };
  switch (type) {
    case ScalarType::kFloat16:
      return any(static_cast<const uint16_t*>(values),
                 [](uint16_t v) { return (v & 0x7FFF) > 0x7C00; });
    case ScalarType::kFloat32:
      return any(static_cast<const float*>(values), [](float v) { return std::isnan(v); });
    case ScalarType::kFloat64:
      return any(static_cast<const double*>(values), [](double v) { return std::isnan(v); });
    default:
      return false;
  }
}

// Which of `count` values have no place in what the converter makes of them; empty if all have.
std::string misfit(const Converter& converter, const void* host, size_t count) {
  if (converter.kind == Conversion::kQuantized && has_nan(converter.host, host, count)) {
    return "NaN";
  }
  if (converter.kind == Conversion::kInt64Int32) {
    const auto* values = static_cast<const int64_t*>(host);
    for (size_t i = 0; i < count; ++i) {
      if (values[i] < INT32_MIN || values[i] > INT32_MAX) return std::to_string(values[i]);
    }
  }
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

std::optional<Converter> StateDescriptor::converter() const {
  return executorch_qnn::converter(host_type, stored_type, encoding);
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
  if (!descriptor.converter()) {
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
  d.converter()->to_host(slot.front_.address(), host, d.elements());
  bytes_copied_ += d.stored_bytes();
  return {};
}

Status StateStore::write(StateSlot& slot, const void* host, size_t size) {
  const StateDescriptor& d = slot.descriptor_;
  ETQNN_TRY(d.check_host_bytes(size));
  const Converter converter = *d.converter();
  // Checked before a byte changes.
  if (const std::string wrong = misfit(converter, host, d.elements()); !wrong.empty()) {
    return {ErrorKind::kState, "buffer " + d.describe() + " cannot hold " + wrong};
  }
  converter.to_npu(host, slot.front_.address(), d.elements());
  bytes_copied_ += d.stored_bytes();
  return {};
}

}  // namespace executorch_qnn
