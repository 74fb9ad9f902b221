// SPDX-License-Identifier: BSD-3-Clause
#include "state/state_file.h"

#include <cstring>
#include <map>
#include <optional>
#include <type_traits>
#include <utility>

#include "core/byte_reader.h"
#include "core/file.h"

namespace executorch_qnn {
namespace {

constexpr char kMagic[8] = {'E', 'T', 'Q', 'N', 'N', 'S', 'T', 'A'};
constexpr uint16_t kMajor = 1;
constexpr uint16_t kMinor = 0;
constexpr size_t kCrcAt = 12;  // everything else in the file is under it
constexpr size_t kCrcEnd = kCrcAt + sizeof(uint32_t);

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

// stored_bytes() of dimensions that nobody vouches for; nothing if that is no number.
std::optional<uint64_t> size_of(const StateDescriptor& d) {
  uint64_t bytes = element_bytes(d.stored_type);
  for (uint32_t dim : d.dims) {
    if (__builtin_mul_overflow(bytes, uint64_t{dim}, &bytes)) return std::nullopt;
  }
  return bytes;
}

Status refuse(const std::string& path, const std::string& why) {
  return {ErrorKind::kState, "cannot load state from " + path + ": " + why};
}

struct Record {
  StateDescriptor descriptor;
  const uint8_t* data;
};

// An intact file of this version; `records` point into `file`.
struct Parsed {
  Digest program{};
  std::vector<Record> records;
};

Result<Parsed> parse(const MappedFile& file, const std::string& path) {
  ByteReader in(file.data(), file.size());
  const uint8_t* magic = in.bytes(sizeof kMagic);
  if (magic == nullptr || std::memcmp(magic, kMagic, sizeof kMagic) != 0) {
    return refuse(path, "it is no state file");
  }
  const auto major = in.number<uint16_t>();
  const auto minor = in.number<uint16_t>();
  const auto crc = in.number<uint32_t>();
  const auto size = in.number<uint64_t>();
  if (!in.ok()) return refuse(path, "it is cut short");
  if (major != kMajor || minor != kMinor) {
    const auto version = [](int first, int second) {
      return std::to_string(first) + "." + std::to_string(second);
    };
    return refuse(path, "its format is " + version(major, minor) + ", this version reads " +
                            version(kMajor, kMinor) + "; it was saved by another executorch-qnn");
  }
  if (size != file.size()) {
    return refuse(path, "it has " + std::to_string(file.size()) + " bytes and should have " +
                            std::to_string(size));
  }
  const auto* start = static_cast<const uint8_t*>(file.data());
  if (crc != crc32(start + kCrcEnd, size - kCrcEnd, crc32(start, kCrcAt))) {
    return refuse(path, "it is damaged (checksum)");
  }
  Parsed parsed;
  if (const uint8_t* digest = in.bytes(parsed.program.size())) {
    std::memcpy(parsed.program.data(), digest, parsed.program.size());
  }
  const auto count = in.number<uint32_t>();
  for (uint32_t i = 0; in.ok() && i < count; ++i) {
    Record record{unpack(in), nullptr};
    const auto bytes = in.number<uint64_t>();
    record.data = in.bytes(bytes);
    if (in.ok() && bytes != size_of(record.descriptor)) {
      return refuse(path, "it is damaged (buffer " + record.descriptor.name + ")");
    }
    parsed.records.push_back(std::move(record));
  }
  if (!in.ok() || in.remaining() > 0)
    return refuse(path, "it is damaged (its parts do not add up)");
  return parsed;
}

}  // namespace

Status write_state_file(const std::string& path, const Digest& program,
                        const std::vector<StateRecord>& records) {
  // What precedes the bytes of each buffer; the last one, behind all of them, is empty.
  std::vector<std::string> between;
  Packer head;
  for (uint8_t byte : program) head.number(byte);
  head.number(static_cast<uint32_t>(records.size()));
  std::string next = head.bytes();
  uint64_t size = kCrcEnd + sizeof(uint64_t);
  for (const StateRecord& record : records) {
    between.push_back(next + pack(record.descriptor));
    size += between.back().size() + record.descriptor.stored_bytes();
    next.clear();
  }
  size += next.size();
  between.push_back(std::move(next));

  Packer before, behind;
  for (char c : kMagic) before.number(c);
  before.number(kMajor).number(kMinor);
  behind.number(size);
  uint32_t crc = crc32(before.bytes().data(), before.bytes().size());
  crc = crc32(behind.bytes().data(), behind.bytes().size(), crc);
  for (size_t i = 0; i < between.size(); ++i) {
    crc = crc32(between[i].data(), between[i].size(), crc);
    if (i < records.size()) {
      crc = crc32(records[i].data, records[i].descriptor.stored_bytes(), crc);
    }
  }

  ETQNN_ASSIGN(OutputFile file, OutputFile::create(path));
  const std::string header = before.number(crc).bytes() + behind.bytes();
  ETQNN_TRY(file.write(header.data(), header.size()));
  for (size_t i = 0; i < between.size(); ++i) {
    ETQNN_TRY(file.write(between[i].data(), between[i].size()));
    if (i < records.size()) {
      ETQNN_TRY(file.write(records[i].data, records[i].descriptor.stored_bytes()));
    }
  }
  return file.commit();
}

Status read_state_file(const std::string& path, const Digest& program,
                       const std::vector<StateRecord>& records) {
  ETQNN_ASSIGN(const MappedFile file, MappedFile::open(path));
  ETQNN_ASSIGN(const Parsed parsed, parse(file, path));
  if (parsed.program != program) {
    return refuse(path, "it was saved with another program file (" + to_hex(parsed.program) +
                            ", this one is " + to_hex(program) + ")");
  }
  std::map<std::string, const StateRecord*> expected;
  for (const StateRecord& record : records) expected[record.descriptor.name] = &record;
  std::vector<std::pair<const StateRecord*, const uint8_t*>> copies;
  for (const Record& saved : parsed.records) {
    const auto found = expected.find(saved.descriptor.name);
    if (found == expected.end()) {
      return refuse(path, "buffer " + saved.descriptor.name + " is not in this program");
    }
    const StateDescriptor& own = found->second->descriptor;
    if (!(own == saved.descriptor)) {
      return refuse(
          path, "saved " + saved.descriptor.describe() + ", this program has " + own.describe());
    }
    copies.emplace_back(found->second, saved.data);
    expected.erase(found);
  }
  if (!expected.empty()) {
    return refuse(path, "buffer " + expected.begin()->first + " is not in the file");
  }
  for (const auto& [record, data] : copies) {
    std::memcpy(record->data, data, record->descriptor.stored_bytes());
  }
  return {};
}

Result<StateFileInfo> inspect_state_file(const std::string& path) {
  ETQNN_ASSIGN(const MappedFile file, MappedFile::open(path));
  ETQNN_ASSIGN(Parsed parsed, parse(file, path));
  StateFileInfo info{kMajor, kMinor, parsed.program, file.size(), {}};
  for (Record& record : parsed.records) info.buffers.push_back(std::move(record.descriptor));
  return info;
}

}  // namespace executorch_qnn
