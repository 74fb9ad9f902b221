// SPDX-License-Identifier: BSD-3-Clause
// The state store, its host view and its files.
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "check.h"
#include "core/digest.h"
#include "core/file.h"
#include "state/state_file.h"
#include "state/store.h"

using namespace executorch_qnn;

namespace {

StateDescriptor descriptor(const std::string& name, std::vector<uint32_t> dims,
                           ScalarType host = ScalarType::kFloat32,
                           abi::DataType stored = abi::DataType::kFloat16) {
  StateDescriptor d;
  d.name = name;
  d.dims = std::move(dims);
  d.host_type = host;
  d.stored_type = stored;
  return d;
}

struct TempFolder {
  std::string path;
  TempFolder() {
    char name[] = "/tmp/etqnn-test-XXXXXX";
    path = mkdtemp(name);
  }
  ~TempFolder() { [[maybe_unused]] int result = std::system(("rm -r " + path).c_str()); }
  std::string file(const char* name) const { return path + "/" + name; }
  size_t files() const {
    size_t count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(path)) count += entry.exists();
    return count;
  }
  // What somebody who looks for "state*" does not see.
  size_t remove_hidden() const {
    std::vector<std::filesystem::path> hidden;
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
      if (entry.path().filename().string()[0] == '.') hidden.push_back(entry.path());
    }
    for (const auto& file : hidden) std::filesystem::remove(file);
    return hidden.size();
  }
};

std::vector<char> slurp(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void spill(const std::string& path, const std::vector<char>& bytes) {
  std::ofstream(path, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

}  // namespace

// ------------------------------------------------------------------------------------- digests

TEST(digests_are_the_standard_ones) {
  CHECK_EQ(to_hex(Sha256::of("abc", 3)),
           "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK_EQ(to_hex(Sha256::of("", 0)),
           "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK_EQ(crc32("123456789", 9), 0xCBF43926u);
}

TEST(digests_do_not_depend_on_how_bytes_arrive) {
  std::mt19937 random(4);
  std::vector<uint8_t> bytes(1000);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  for (size_t size : {0, 1, 55, 56, 63, 64, 65, 127, 128, 1000}) {
    Sha256 pieces;
    for (size_t at = 0; at < size;) {
      const size_t n = std::min<size_t>(1 + random() % 70, size - at);
      pieces.update(bytes.data() + at, n);
      at += n;
    }
    CHECK(pieces.finish() == Sha256::of(bytes.data(), size));
    const size_t cut = size / 3;
    CHECK_EQ(crc32(bytes.data() + cut, size - cut, crc32(bytes.data(), cut)),
             crc32(bytes.data(), size));
  }
  for (size_t size = 0; size < bytes.size(); ++size) {
    CHECK_EQ(crc32(bytes.data(), size, 77), internal::crc32_portable(bytes.data(), size, 77));
  }
  uint32_t a[8] = {1, 2, 3, 4, 5, 6, 7, 8}, b[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  internal::sha256_portable(a, bytes.data(), 15);
  internal::sha256_best()(b, bytes.data(), 15);
  CHECK(std::memcmp(a, b, sizeof a) == 0);
}

// ------------------------------------------------------------------------------------- the store

TEST(slots_are_aligned_and_start_from_their_initial_value) {
  StateStore store;
  const auto initial = std::make_shared<std::vector<uint16_t>>(4, uint16_t{0x3C00});
  CHECK_VALUE(zeros, store.bind(descriptor("z", {3, 5}), StateBinding::kInPlace, {}));
  CHECK_VALUE(ones,
              store.bind(descriptor("o", {4}), StateBinding::kInPlace, {initial, initial->data()}));
  for (const StateSlot* slot : {zeros, ones}) {
    CHECK_EQ(reinterpret_cast<uintptr_t>(slot->front()) % 128, 0u);
  }
  float values[15];
  CHECK_OK(store.read(*zeros, values, sizeof values));
  for (float value : values) CHECK_EQ(value, 0.0f);
  CHECK_OK(store.read(*ones, values, 4 * sizeof(float)));
  CHECK_EQ(values[3], 1.0f);
}

TEST(the_same_name_is_the_same_slot_if_the_descriptors_agree) {
  StateStore store;
  CHECK_VALUE(first, store.bind(descriptor("a.k", {2, 2}), StateBinding::kReadOnly, {}));
  const float written[] = {1, 2, 3, 4};
  CHECK_OK(store.write(*first, written, sizeof written));
  CHECK_VALUE(second, store.bind(descriptor("a.k", {2, 2}), StateBinding::kInPlace, {}));
  CHECK(first == second);
  float values[4];
  CHECK_OK(store.read(*second, values, sizeof values));
  CHECK_EQ(values[2], 3.0f);
  CHECK(second->binding() == StateBinding::kInPlace);

  auto other = descriptor("a.k", {2, 2});
  other.encoding = {true, 0.5f, 0};
  for (const StateDescriptor& wrong :
       {descriptor("a.k", {4}), descriptor("a.k", {2, 2}, ScalarType::kFloat16), other}) {
    const Status status = store.bind(wrong, StateBinding::kInPlace, {}).status();
    CHECK(status.kind() == ErrorKind::kState);
    CHECK_CONTAINS(status.message(), "a.k: float32[2, 2] stored as FLOAT16");
    CHECK_CONTAINS(status.message(), wrong.describe());
  }
}

TEST(two_initial_values_for_one_buffer_are_refused) {
  StateStore store;
  const auto ones = std::make_shared<std::vector<uint16_t>>(2, uint16_t{0x3C00});
  const auto same = std::make_shared<std::vector<uint16_t>>(*ones);
  CHECK_OK(store.bind(descriptor("a", {2}), StateBinding::kInPlace, {ones, ones->data()}).status());
  CHECK_OK(store.bind(descriptor("a", {2}), StateBinding::kInPlace, {same, same->data()}).status());
  CHECK(!store.bind(descriptor("a", {2}), StateBinding::kInPlace, {}).ok());
}

TEST(double_buffers_change_places_without_a_copy) {
  StateStore store;
  CHECK_VALUE(slot, store.bind(descriptor("a", {2}), StateBinding::kDoubleBuffer, {}));
  const void* front = slot->front();
  const void* back = slot->target(StateBinding::kDoubleBuffer);
  CHECK(front != back);
  CHECK(slot->target(StateBinding::kInPlace) == front);
  const uint64_t copied = store.bytes_copied();
  const uint64_t epoch = store.epoch();
  store.swap(*slot);
  CHECK(slot->front() == back && slot->target(StateBinding::kDoubleBuffer) == front);
  CHECK(store.epoch() != epoch);
  CHECK_EQ(store.bytes_copied(), copied);
}

TEST(a_quantized_slot_shows_reals_and_keeps_its_bits) {
  StateStore store;
  StateDescriptor d = descriptor("q", {256}, ScalarType::kFloat32, abi::DataType::kUFixed8);
  d.encoding = {true, 0.05F, -100};  // real = (q - 100) * 0.05
  std::vector<uint8_t> initial(256);
  for (size_t i = 0; i < 256; ++i) initial[i] = static_cast<uint8_t>(i);
  const auto owner = std::make_shared<std::vector<uint8_t>>(initial);
  CHECK_VALUE(slot, store.bind(d, StateBinding::kInPlace, {owner, owner->data()}));
  std::vector<float> reals(256);
  CHECK_OK(store.read(*slot, reals.data(), 256 * sizeof(float)));
  CHECK(reals[100] == 0 && reals[0] == -100 * 0.05F && reals[255] == 155 * 0.05F);
  CHECK_OK(store.write(*slot, reals.data(), 256 * sizeof(float)));
  CHECK(std::memcmp(slot->front(), initial.data(), 256) == 0);
  reals[0] = 0.074F;  // 1.48 steps: down
  reals[1] = 0.076F;  // 1.52: up
  reals[2] = -1e9F;
  reals[3] = INFINITY;
  CHECK_OK(store.write(*slot, reals.data(), 256 * sizeof(float)));
  const auto* stored = static_cast<const uint8_t*>(slot->front());
  CHECK(stored[0] == 101 && stored[1] == 102 && stored[2] == 0 && stored[3] == 255);
  reals[4] = NAN;
  reals[0] = 1;
  CHECK(store.write(*slot, reals.data(), 256 * sizeof(float)).kind() == ErrorKind::kState);
  CHECK_EQ(stored[0], 101);
}

TEST(a_quantized_slot_of_any_float_shows_its_type_and_refuses_nan) {
  for (const ScalarType host : {ScalarType::kFloat16, ScalarType::kFloat64}) {
    StateStore store;
    StateDescriptor d = descriptor("q", {2}, host, abi::DataType::kSFixed16);
    d.encoding = {true, 0.5F, 10};
    CHECK_VALUE(slot, store.bind(d, StateBinding::kInPlace, {}));
    const bool half = host == ScalarType::kFloat16;
    const double ones[] = {1, 1}, bad[] = {1, NAN};
    const uint16_t half_ones[] = {0x3C00, 0x3C00}, half_bad[] = {0x3C00, 0x7E00};
    const void* fine = half ? static_cast<const void*>(half_ones) : ones;
    const void* wrong = half ? static_cast<const void*>(half_bad) : bad;
    CHECK_OK(store.write(*slot, fine, d.host_bytes()));
    const auto* stored = static_cast<const int16_t*>(slot->front());
    CHECK(stored[0] == -8 && stored[1] == -8);
    CHECK_CONTAINS(store.write(*slot, wrong, d.host_bytes()).message(), "cannot hold NaN");
    uint8_t back[16];
    CHECK_OK(store.read(*slot, back, d.host_bytes()));
    CHECK(std::memcmp(back, fine, d.host_bytes()) == 0);
  }
}

TEST(every_value_of_every_quantized_type_comes_back) {
  for (const abi::DataType type : {abi::DataType::kUFixed8, abi::DataType::kSFixed8,
                                   abi::DataType::kUFixed16, abi::DataType::kSFixed16}) {
    const size_t bytes = element_bytes(type);
    const uint32_t count = bytes == 1 ? 256 : 65536;
    for (const float scale : {1e-6F, 0.1F, 1.0F / 3, 77.7F}) {
      for (const int32_t offset : {0, -128, -32768, 13}) {
        StateStore store;
        StateDescriptor d = descriptor("q", {count}, ScalarType::kFloat32, type);
        d.encoding = {true, scale, offset};
        const auto all = std::make_shared<std::vector<uint8_t>>(count * bytes);
        for (uint32_t i = 0; i < count; ++i) std::memcpy(all->data() + i * bytes, &i, bytes);
        CHECK_VALUE(slot, store.bind(d, StateBinding::kInPlace, {all, all->data()}));
        std::vector<float> reals(count);
        CHECK_OK(store.read(*slot, reals.data(), count * sizeof(float)));
        CHECK_OK(store.write(*slot, reals.data(), count * sizeof(float)));
        CHECK(std::memcmp(slot->front(), all->data(), all->size()) == 0);
      }
    }
  }
}

TEST(reset_restores_the_initial_values) {
  StateStore store;
  const auto initial = std::make_shared<std::vector<int32_t>>(1, 7);
  CHECK_VALUE(slot, store.bind(descriptor("n", {}, ScalarType::kInt64, abi::DataType::kInt32),
                               StateBinding::kDoubleBuffer, {initial, initial->data()}));
  int64_t value = 99;
  CHECK_OK(store.write(*slot, &value, sizeof value));
  store.swap(*slot);
  store.reset();
  CHECK_OK(store.read(*slot, &value, sizeof value));
  CHECK_EQ(value, 7);
}

TEST(a_fork_has_its_own_bytes) {
  StateStore store;
  CHECK_VALUE(slot, store.bind(descriptor("a", {2}), StateBinding::kInPlace, {}));
  const float written[] = {1, 2};
  CHECK_OK(store.write(*slot, written, sizeof written));
  CHECK_VALUE(twin, store.fork());
  StateSlot* copy = twin->find("a");
  CHECK(copy != nullptr && copy->front() != slot->front());
  store.reset();
  float values[2];
  CHECK_OK(twin->read(*copy, values, sizeof values));
  CHECK_EQ(values[1], 2.0f);
  twin->reset();
  CHECK_OK(twin->read(*copy, values, sizeof values));
  CHECK_EQ(values[1], 0.0f);
}

TEST(writes_that_do_not_fit_change_nothing) {
  StateStore store;
  CHECK_VALUE(slot, store.bind(descriptor("n", {2}, ScalarType::kInt64, abi::DataType::kInt32),
                               StateBinding::kInPlace, {}));
  const int64_t fine[] = {1, 2};
  CHECK_OK(store.write(*slot, fine, sizeof fine));
  const int64_t large[] = {5, int64_t{1} << 40};
  CHECK_CONTAINS(store.write(*slot, large, sizeof large).message(), "1099511627776");
  CHECK(store.write(*slot, fine, sizeof fine - 1).kind() == ErrorKind::kState);
  int64_t values[2];
  CHECK_OK(store.read(*slot, values, sizeof values));
  CHECK_EQ(values[0], 1);
}

// ------------------------------------------------------------------------------------- files

namespace {

struct Saved {
  TempFolder folder;
  std::string path = folder.file("state");
  Digest program = Sha256::of("program", 7);
  float k[6] = {1, 2, 3, 4, 5, 6};
  int32_t n = 42;

  std::vector<StateRecord> records() {
    return {{descriptor("k", {2, 3}, ScalarType::kFloat32, abi::DataType::kFloat32), k},
            {descriptor("n", {}, ScalarType::kInt32, abi::DataType::kInt32), &n}};
  }
  Saved() { CHECK_OK(write_state_file(path, program, records())); }
  // What is in memory must be as it was after a refused load.
  void check_refused(const std::vector<char>& bytes) {
    spill(path, bytes);
    k[0] = -1;
    n = -2;
    CHECK(read_state_file(path, program, records()).kind() == ErrorKind::kState);
    CHECK(inspect_state_file(path).status().kind() == ErrorKind::kState);
    CHECK_EQ(k[0], -1.0f);
    CHECK_EQ(n, -2);
  }
};

}  // namespace

TEST(saved_state_comes_back) {
  Saved saved;
  saved.k[5] = saved.n = 0;
  CHECK_OK(read_state_file(saved.path, saved.program, saved.records()));
  CHECK_EQ(saved.k[5], 6.0f);
  CHECK_EQ(saved.n, 42);
}

TEST(a_file_says_what_it_holds) {
  Saved saved;
  CHECK_VALUE(info, inspect_state_file(saved.path));
  CHECK_EQ(info.major, 1);
  CHECK_EQ(info.minor, 0);
  CHECK(info.program == saved.program);
  CHECK_EQ(info.bytes, slurp(saved.path).size());
  CHECK_EQ(info.buffers.size(), 2u);
  CHECK_EQ(info.buffers[0].describe(), "k: float32[2, 3] stored as FLOAT32");
  CHECK(inspect_state_file(saved.folder.file("none")).status().kind() == ErrorKind::kIo);
}

TEST(the_encoding_is_part_of_the_file) {
  TempFolder folder;
  StateDescriptor d = descriptor("q", {2}, ScalarType::kInt8, abi::DataType::kSFixed8);
  d.encoding = {true, 0.25f, -3};
  int8_t values[] = {1, 2};
  CHECK_OK(write_state_file(folder.file("s"), {}, {{d, values}}));
  CHECK_VALUE(info, inspect_state_file(folder.file("s")));
  CHECK(info.buffers[0] == d);
  d.encoding.offset = -4;
  CHECK_CONTAINS(read_state_file(folder.file("s"), {}, {{d, values}}).message(), "offset -3");
}

TEST(saving_replaces_the_file_whole_or_not_at_all) {
  Saved saved;
  saved.n = 43;
  CHECK_OK(write_state_file(saved.path, saved.program, saved.records()));
  CHECK_OK(read_state_file(saved.path, saved.program, saved.records()));
  CHECK_EQ(saved.n, 43);
  const Status status =
      write_state_file(saved.folder.file("no/such/folder"), saved.program, saved.records());
  CHECK(status.kind() == ErrorKind::kIo);
  CHECK_EQ(saved.folder.files(), 1u);
}

TEST(a_full_disk_leaves_the_old_file_and_nothing_else) {
  Saved saved;
  const std::vector<char> before = slurp(saved.path);
  std::vector<float> large(1 << 20, 1.0f);
  auto records = saved.records();
  records.push_back({descriptor("large", {1 << 20}, ScalarType::kFloat32, abi::DataType::kFloat32),
                     large.data()});
  struct rlimit old{};
  getrlimit(RLIMIT_FSIZE, &old);
  const struct rlimit small{1 << 16, old.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &small);
  const Status status = write_state_file(saved.path, saved.program, records);
  const Status mapped = OutputFile::create(saved.path, 1 << 20).status();
  setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, handler);
  CHECK(status.kind() == ErrorKind::kIo && mapped.kind() == ErrorKind::kIo);
  CHECK_CONTAINS(status.message(), saved.path + ": File too large");
  CHECK(slurp(saved.path) == before);
  CHECK_EQ(saved.folder.files(), 1u);
}

TEST(only_regular_files_are_replaced) {
  Saved saved;
  const std::string fifo = saved.folder.file("fifo");
  CHECK_EQ(mkfifo(fifo.c_str(), 0600), 0);
  for (const std::string& path : {fifo, saved.folder.path, std::string("/dev/null")}) {
    struct stat before{}, after{};
    stat(path.c_str(), &before);
    CHECK(write_state_file(path, saved.program, saved.records()).kind() == ErrorKind::kIo);
    stat(path.c_str(), &after);
    CHECK(before.st_ino == after.st_ino && before.st_mode == after.st_mode);
  }
  CHECK_EQ(saved.folder.files(), 2u);
}

TEST(a_link_leads_to_the_new_file_and_a_mode_stays) {
  Saved saved;
  const std::string link = saved.folder.file("link");
  CHECK_EQ(symlink("state", link.c_str()), 0);
  CHECK_EQ(chmod(saved.path.c_str(), 0640), 0);
  saved.n = 44;
  CHECK_OK(write_state_file(link, saved.program, saved.records()));
  struct stat info{};
  CHECK_EQ(lstat(link.c_str(), &info), 0);
  CHECK(S_ISLNK(info.st_mode));
  CHECK_EQ(stat(saved.path.c_str(), &info), 0);
  CHECK_EQ(info.st_mode & 07777, 0640u);
  saved.n = 0;
  CHECK_OK(read_state_file(saved.path, saved.program, saved.records()));
  CHECK_EQ(saved.n, 44);
}

// The writer is killed at a random moment, 200 times: there is the old file or the new one.
TEST(a_killed_writer_leaves_the_old_or_the_new_file) {
  TempFolder folder;
  const std::string path = folder.file("state");
  std::vector<uint64_t> values(1 << 17);
  const std::vector<StateRecord> records = {
      {descriptor("v", {1 << 18}, ScalarType::kInt32, abi::DataType::kInt32), values.data()}};
  CHECK_OK(write_state_file(path, {}, records));
  std::mt19937 random(5);
  size_t left = 0;
  for (int round = 0; round < 200; ++round) {
    const uint64_t start = values[0];
    const pid_t writer = fork();
    if (writer == 0) {
      for (;;) {
        for (uint64_t& value : values) ++value;
        if (!write_state_file(path, {}, records).ok()) _exit(1);
      }
    }
    usleep(random() % 6000);
    CHECK_EQ(kill(writer, SIGKILL), 0);
    int status = 0;
    CHECK_EQ(waitpid(writer, &status, 0), writer);
    CHECK(WIFSIGNALED(status));
    std::fill(values.begin(), values.end(), 0);
    CHECK_OK(read_state_file(path, {}, records));
    CHECK(values[0] >= start);
    for (uint64_t value : values) CHECK_EQ(value, values[0]);
    left += folder.remove_hidden();
    CHECK_EQ(folder.files(), 1u);
  }
  CHECK(values[0] > 0);
  std::fprintf(stderr, "       %zu of 200 writers left a temporary file\n", left);
}

TEST(state_of_another_program_is_refused) {
  Saved saved;
  saved.n = -1;
  const Status status = read_state_file(saved.path, Sha256::of("other", 5), saved.records());
  CHECK(status.kind() == ErrorKind::kState);
  CHECK_CONTAINS(status.message(), "another program");
  CHECK_EQ(saved.n, -1);
}

TEST(state_of_other_buffers_is_refused) {
  Saved saved;
  auto records = saved.records();
  records[0].descriptor.dims = {3, 2};
  CHECK_CONTAINS(read_state_file(saved.path, saved.program, records).message(),
                 "this program has k: float32[3, 2]");
  records = saved.records();
  records.pop_back();
  CHECK_CONTAINS(read_state_file(saved.path, saved.program, records).message(), "buffer n");
  records = saved.records();
  float extra = 0;
  records.push_back({descriptor("x", {}, ScalarType::kFloat32, abi::DataType::kFloat32), &extra});
  CHECK_CONTAINS(read_state_file(saved.path, saved.program, records).message(), "buffer x");
}

TEST(a_file_of_another_version_is_refused_whatever_its_checksum) {
  Saved saved;
  for (const size_t at : {8, 10}) {
    auto newer = slurp(saved.path);
    ++newer[at];
    uint32_t crc = crc32(newer.data(), 12);
    crc = crc32(newer.data() + 16, newer.size() - 16, crc);
    std::memcpy(newer.data() + 12, &crc, sizeof crc);
    const std::string path = saved.folder.file("newer");
    spill(path, newer);
    CHECK_CONTAINS(read_state_file(path, saved.program, saved.records()).message(),
                   at == 8 ? "its format is 2.0, this version reads 1.0"
                           : "its format is 1.1, this version reads 1.0");
  }
}

TEST(damaged_state_files_leave_the_state_alone) {
  Saved saved;
  const std::vector<char> good = slurp(saved.path);
  for (size_t size = 0; size < good.size(); ++size) {
    saved.check_refused({good.begin(), good.begin() + static_cast<ptrdiff_t>(size)});
  }
  for (size_t bit = 0; bit < 8 * good.size(); ++bit) {
    auto flipped = good;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    saved.check_refused(flipped);
  }
  auto longer = good;
  longer.push_back(0);
  saved.check_refused(longer);
}

TEST_MAIN()
