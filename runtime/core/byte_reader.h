// SPDX-License-Identifier: BSD-3-Clause
// Reads packed little-endian records out of bytes that nobody vouches for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

namespace executorch_qnn {

// Every read is checked against the end. The first one that fails makes all later ones return zero
// values, so that a parser checks ok() where it needs a value and once at the end.
class ByteReader {
 public:
  ByteReader(const void* data, size_t size)
      : at_(static_cast<const uint8_t*>(data)), end_(at_ + size) {}

  bool ok() const { return ok_; }
  size_t remaining() const { return static_cast<size_t>(end_ - at_); }

  template <class T>
  T number() {
    static_assert(std::is_arithmetic_v<T>);
    T value{};
    if (const uint8_t* from = bytes(sizeof value)) std::memcpy(&value, from, sizeof value);
    return value;
  }

  // Null if there are not as many.
  const uint8_t* bytes(size_t count) {
    if (!ok_ || count > remaining()) {
      ok_ = false;
      return nullptr;
    }
    const uint8_t* from = at_;
    at_ += count;
    return from;
  }

  // A u32 length and that many bytes. Longer than 64 KiB, or with a NUL inside, is not a name.
  std::string text() {
    const auto length = number<uint32_t>();
    if (length > 0xFFFF) ok_ = false;
    const uint8_t* from = bytes(length);
    if (from == nullptr) return {};
    if (length > 0 && std::memchr(from, 0, length) != nullptr) {
      ok_ = false;
      return {};
    }
    return {reinterpret_cast<const char*>(from), length};
  }

  // A u32 count of records of which each takes at least `record_bytes`: 0, and not ok(), if they
  // cannot all be there. So nobody reserves memory for a number that was made up.
  uint32_t count(size_t record_bytes) {
    const auto value = number<uint32_t>();
    if (ok_ && value > remaining() / record_bytes) ok_ = false;
    return ok_ ? value : 0;
  }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
  bool ok_ = true;
};

}  // namespace executorch_qnn
