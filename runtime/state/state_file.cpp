// SPDX-License-Identifier: BSD-3-Clause
#include "state/state_file.h"

#include <cstring>
#include <map>
#include <type_traits>

#include "core/byte_reader.h"
#include "core/file.h"

namespace executorch_qnn {
namespace {

constexpr char kMagic[8] = {'E', 'T', 'Q', 'N', 'N', 'S', 'T', 'A'};
constexpr uint16_t kMajor = 1;
constexpr uint16_t kMinor = 0;
constexpr size_t kCrcStart = 16;

// The record of a buffer up to its bytes.
class Packer {
 public:
  template <class T>
  Packer& number(T value) {
    static_assert(std::is_arithmetic_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Packer& text(const std::string& value) {
    number(static_cast<uint32_t>(value.size()));
    bytes_ += value;
    return *this;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

std::string pack(const StateDescriptor& d) {
  Packer out;
  out.text(d.name).number(static_cast<int32_t>(d.host_type));
  out.number(static_cast<uint32_t>(d.stored_type)).number(static_cast<uint32_t>(d.dims.size()));
  for (uint32_t dim : d.dims) out.number(dim);
  out.number(static_cast<uint32_t>(d.encoding.quantized));
  out.number(d.encoding.scale).number(d.encoding.offset);
  out.number(static_cast<uint64_t>(d.stored_bytes()));
  return out.bytes();
}

StateDescriptor unpack(ByteReader& in) {
  StateDescriptor d;
  d.name = in.text();
  d.host_type = static_cast<ScalarType>(in.number<int32_t>());
  d.stored_type = static_cast<abi::DataType>(in.number<uint32_t>());
  d.dims.resize(in.count(sizeof(uint32_t)));
  for (uint32_t& dim : d.dims) dim = in.number<uint32_t>();
  d.encoding.quantized = in.number<uint32_t>() != 0;
  d.encoding.scale = in.number<float>();
  d.encoding.offset = in.number<int32_t>();
  return d;
}

Status refuse(const std::string& path, const std::string& why) {
  return {ErrorKind::kState, "cannot load state from " + path + ": " + why};
}

}  // namespace

Status write_state_file(const std::string& path, const Digest& program,
                        const std::vector<StateRecord>& records) {
  Packer header;
  for (char c : kMagic) header.number(c);
  header.number(kMajor).number(kMinor);
  uint64_t size = kCrcStart + sizeof(uint64_t) + program.size() + sizeof(uint32_t);
  std::vector<std::string> packed;
  for (const StateRecord& record : records) {
    packed.push_back(pack(record.descriptor));
    size += packed.back().size() + record.descriptor.stored_bytes();
  }
  Packer body;
  body.number(size);
  for (uint8_t byte : program) body.number(byte);
  body.number(static_cast<uint32_t>(records.size()));

  ETQNN_ASSIGN(OutputFile file, OutputFile::create(path, size));
  auto* start = static_cast<uint8_t*>(file.data());
  uint8_t* at = start + kCrcStart;
  const auto put = [&at](const void* data, size_t bytes) {
    std::memcpy(at, data, bytes);
    at += bytes;
  };
  put(body.bytes().data(), body.bytes().size());
  for (size_t i = 0; i < records.size(); ++i) {
    put(packed[i].data(), packed[i].size());
    put(records[i].data, records[i].descriptor.stored_bytes());
  }
  header.number(crc32(start + kCrcStart, size - kCrcStart));
  std::memcpy(start, header.bytes().data(), header.bytes().size());
  return file.commit(size);
}

Status read_state_file(const std::string& path, const Digest& program,
                       const std::vector<StateRecord>& records) {
  ETQNN_ASSIGN(const MappedFile file, MappedFile::open(path));
  ByteReader in(file.data(), file.size());
  const uint8_t* magic = in.bytes(sizeof kMagic);
  if (magic == nullptr || std::memcmp(magic, kMagic, sizeof kMagic) != 0) {
    return refuse(path, "it is no state file");
  }
  const auto major = in.number<uint16_t>();
  in.number<uint16_t>();  // minor: whatever it added lies behind what is read here
  const auto crc = in.number<uint32_t>();
  const auto size = in.number<uint64_t>();
  if (in.ok() && major != kMajor) {
    return refuse(path, "its format is " + std::to_string(major) + ", this version reads " +
                            std::to_string(kMajor));
  }
  if (!in.ok() || size != file.size()) return refuse(path, "it is cut short");
  if (crc != crc32(static_cast<const uint8_t*>(file.data()) + kCrcStart, size - kCrcStart)) {
    return refuse(path, "it is damaged (checksum)");
  }
  const uint8_t* digest = in.bytes(program.size());
  if (digest == nullptr || std::memcmp(digest, program.data(), program.size()) != 0) {
    return refuse(path, "it was saved with another program file");
  }

  std::map<std::string, const StateRecord*> expected;
  for (const StateRecord& record : records) expected[record.descriptor.name] = &record;
  std::vector<std::pair<const StateRecord*, const uint8_t*>> copies;
  const auto count = in.number<uint32_t>();
  for (uint32_t i = 0; in.ok() && i < count; ++i) {
    const StateDescriptor descriptor = unpack(in);
    const auto bytes = in.number<uint64_t>();
    const uint8_t* data = in.bytes(bytes);
    if (data == nullptr) break;
    const auto found = expected.find(descriptor.name);
    if (found == expected.end()) {
      return refuse(path, "buffer " + descriptor.name + " is not in this program");
    }
    const StateDescriptor& own = found->second->descriptor;
    if (!(own == descriptor) || bytes != own.stored_bytes()) {
      return refuse(path,
                    "saved " + descriptor.describe() + ", this program has " + own.describe());
    }
    copies.emplace_back(found->second, data);
    expected.erase(found);
  }
  if (!in.ok()) return refuse(path, "it is damaged (ends inside a buffer)");
  if (!expected.empty()) {
    return refuse(path, "buffer " + expected.begin()->first + " is not in the file");
  }
  for (const auto& [record, data] : copies) {
    std::memcpy(record->data, data, record->descriptor.stored_bytes());
  }
  return {};
}

}  // namespace executorch_qnn
