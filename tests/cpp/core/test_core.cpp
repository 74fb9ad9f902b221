// SPDX-License-Identifier: BSD-3-Clause
// Status, files, captured output, captured log.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdarg>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

#include "check.h"
#include "core/file.h"
#include "core/status.h"
#include "core/stdout_capture.h"
#include "qnn/log.h"

namespace fs = std::filesystem;
using namespace executorch_qnn;

namespace {

// A folder that goes away with its test.
class Scratch {
 public:
  Scratch() : folder_(fs::temp_directory_path() / ("etqnn-" + std::to_string(getpid()))) {
    fs::create_directories(folder_);
  }
  ~Scratch() { fs::remove_all(folder_); }
  std::string operator/(const char* name) const { return (folder_ / name).string(); }
  size_t files() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(folder_), {}));
  }

 private:
  fs::path folder_;
};

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void say(abi::LogLevel level, const char* format, ...) {
  va_list args;
  va_start(args, format);
  on_qnn_log(format, level, 0, args);
  va_end(args);
}

Result<int> half(int value) {
  if (value % 2 != 0) return Status(ErrorKind::kInvalid, "odd", 3);
  return value / 2;
}

Status quarter(int value, int& result) {
  ETQNN_ASSIGN(int once, half(value));
  ETQNN_ASSIGN(result, half(once));
  return {};
}

}  // namespace

// ------------------------------------------------------------------------------------- Status

TEST(a_result_hands_on_its_value_or_its_status) {
  int result = 0;
  CHECK_OK(quarter(12, result));
  CHECK_EQ(result, 3);
  Status status = quarter(6, result);
  CHECK(!status.ok());
  CHECK_EQ(status.code(), 3u);
  CHECK_EQ(status.message(), "odd");
  CHECK_EQ(std::string(to_string(status.kind())), "invalid");
}

// ------------------------------------------------------------------------------------- files

TEST(an_output_file_appears_complete_and_cut_to_size) {
  Scratch scratch;
  {
    CHECK_VALUE(file, OutputFile::create(scratch / "out", 1000));
    std::memcpy(file.data(), "hello", 5);
    CHECK(!fs::exists(scratch / "out"));
    CHECK_OK(file.commit(5));
  }
  CHECK_EQ(read(scratch / "out"), "hello");
  CHECK_EQ(scratch.files(), 1u);
  struct stat info{};
  CHECK_EQ(stat((scratch / "out").c_str(), &info), 0);
  CHECK((info.st_mode & 0600) == 0600 && (info.st_mode & 0111) == 0);
}

TEST(an_output_file_that_is_given_up_leaves_nothing) {
  Scratch scratch;
  CHECK_OK(OutputFile::create(scratch / "out", 1000).status());
  CHECK_EQ(scratch.files(), 0u);
}

TEST(an_output_file_replaces_an_older_one) {
  Scratch scratch;
  std::ofstream(scratch / "out") << "a much longer text";
  CHECK_VALUE(file, OutputFile::create(scratch / "out", 3));
  std::memcpy(file.data(), "new", 3);
  CHECK_OK(file.commit(3));
  CHECK_EQ(read(scratch / "out"), "new");
}

TEST(what_is_written_behind_is_complete_in_the_file) {
  Scratch scratch;
  const size_t words = size_t{1} << 23;  // 64 MiB
  {
    CHECK_VALUE(file, OutputFile::create(scratch / "out", words * 8));
    {
      WriteBehind to_file(file.data(), words * 8);
      auto* at = static_cast<uint64_t*>(file.data());
      for (size_t pass = 0; pass < 4; ++pass) {  // also over what has left the memory
        for (size_t i = 0; i < words; ++i) at[i] = pass == 0 ? i : at[i] + i;
      }
    }
    CHECK_OK(file.commit(words * 8));
  }
  std::ifstream file(scratch / "out", std::ios::binary);
  std::vector<uint64_t> held(words);
  file.read(reinterpret_cast<char*>(held.data()), words * 8);
  bool right = true;
  for (size_t i = 0; i < words; ++i) right = right && held[i] == 4 * i;
  CHECK(right);
}

TEST(an_output_file_in_a_missing_folder_is_an_io_error) {
  Status status = OutputFile::create("/nowhere/at/all", 10).status();
  CHECK(status.kind() == ErrorKind::kIo);
  CHECK_CONTAINS(status.message(), "/nowhere/at/all");
  CHECK_CONTAINS(status.message(), "No such file");
}

TEST(an_output_file_larger_than_the_disk_is_an_io_error) {
  Scratch scratch;
  Status status = OutputFile::create(scratch / "out", uint64_t{1} << 60).status();
  CHECK(status.kind() == ErrorKind::kIo);
  CHECK_EQ(scratch.files(), 0u);
}

TEST(a_mapped_file_shows_its_bytes) {
  Scratch scratch;
  std::ofstream(scratch / "in") << "bytes";
  CHECK_VALUE(file, MappedFile::open(scratch / "in"));
  CHECK_EQ(std::string(static_cast<const char*>(file.data()), file.size()), "bytes");
}

TEST(an_empty_file_has_no_bytes) {
  Scratch scratch;
  std::ofstream(scratch / "empty");
  CHECK_VALUE(file, MappedFile::open(scratch / "empty"));
  CHECK_EQ(file.size(), 0u);
}

TEST(what_cannot_be_mapped_is_an_io_error) {
  Scratch scratch;
  for (const std::string& path : {scratch / "missing", std::string("/tmp")}) {
    Status status = MappedFile::open(path).status();
    CHECK(status.kind() == ErrorKind::kIo);
    CHECK_CONTAINS(status.message(), path);
  }
}

// ------------------------------------------------------------------------------------- output

TEST(captured_output_is_returned_and_stdout_restored) {
  Scratch scratch;
  int real = dup(1);
  int file = open((scratch / "stdout").c_str(), O_CREAT | O_RDWR, 0600);
  dup2(file, 1);
  std::printf("before\n");
  std::string text;
  {
    StdoutCapture capture;
    std::printf("inside\n");
    CHECK_EQ(write(1, "raw\n", 4), 4);
    text = capture.finish();
  }
  std::printf("after\n");
  std::fflush(stdout);
  dup2(real, 1);
  close(real);
  close(file);
  CHECK_CONTAINS(text, "inside\n");
  CHECK_CONTAINS(text, "raw\n");
  CHECK_EQ(read(scratch / "stdout"), "before\nafter\n");
}

TEST(capturing_works_with_stdout_closed) {
  int real = dup(1);
  close(1);
  std::string text;
  {
    StdoutCapture capture;
    CHECK_EQ(write(1, "text", 4), 4);
    text = capture.finish();
  }
  bool closed = fcntl(1, F_GETFD) < 0;
  dup2(real, 1);
  close(real);
  CHECK_EQ(text, "text");
  CHECK(closed);
}

TEST(stderr_is_captured_only_on_request) {
  StdoutCapture capture(StdoutCapture::kStdoutAndStderr);
  CHECK_EQ(write(2, "to stderr", 9), 9);
  CHECK_EQ(capture.finish(), "to stderr");
}

TEST(captures_of_several_threads_do_not_mix) {
  auto run = [](const char* word, int* wrong) {
    for (int i = 0; i < 50; ++i) {
      StdoutCapture capture;
      [[maybe_unused]] ssize_t written = write(1, word, 3);
      *wrong += capture.finish() == word ? 0 : 1;
    }
  };
  int wrong[2] = {};
  std::thread one(run, "one", &wrong[0]), two(run, "two", &wrong[1]);
  one.join();
  two.join();
  CHECK_EQ(wrong[0] + wrong[1], 0);
}

TEST(a_diagnostics_file_gets_output_and_log_at_once) {
  Scratch scratch;
  CHECK(set_diagnostics_file(scratch / "log"));
  {
    StdoutCapture capture;
    std::printf("stage one\n");
    say(abi::LogLevel::kDebug, "detail %d", 5);
    CHECK_EQ(read(scratch / "log"), "stage one\n[qnn D] detail 5\n");
  }
  CHECK(set_diagnostics_file(""));
  CHECK(!set_diagnostics_file("/nowhere/at/all"));
}

TEST(a_pipe_as_diagnostics_file_does_not_swallow_the_captured_text) {
  int ends[2];
  CHECK_EQ(pipe(ends), 0);
  CHECK(set_diagnostics_file("/dev/fd/" + std::to_string(ends[1])));
  StdoutCapture capture;
  std::printf("text\n");
  CHECK_EQ(capture.finish(), "text\n");
  CHECK(set_diagnostics_file(""));
  char buffer[16] = {};
  CHECK_EQ(::read(ends[0], buffer, sizeof buffer), 5);
  close(ends[0]);
  close(ends[1]);
}

// ------------------------------------------------------------------------------------- log

TEST(a_capture_keeps_error_lines_trimmed_and_once) {
  LogCapture log;
  say(abi::LogLevel::kError, " <E> first %s\n\n", "line");
  say(abi::LogLevel::kInfo, "not an error");
  say(abi::LogLevel::kError, "second");
  say(abi::LogLevel::kError, "first line");
  say(abi::LogLevel::kError, "\n");
  CHECK_EQ(log.errors(), "first line\nsecond");
}

TEST(the_innermost_capture_of_a_thread_gets_the_line) {
  LogCapture outer;
  {
    LogCapture inner;
    say(abi::LogLevel::kError, "inner");
    CHECK_EQ(inner.errors(), "inner");
  }
  say(abi::LogLevel::kError, "outer");
  CHECK_EQ(outer.errors(), "outer");
}

TEST(a_line_of_a_thread_without_capture_goes_to_all) {
  LogCapture log;
  std::thread([] { say(abi::LogLevel::kError, "from a worker"); }).join();
  std::thread([] {
    LogCapture own;
    say(abi::LogLevel::kError, "of another caller");
  }).join();
  CHECK_EQ(log.errors(), "from a worker");
}

TEST(an_endless_log_is_cut) {
  LogCapture log;
  for (int i = 0; i < 10000; ++i) say(abi::LogLevel::kError, "line number %d", i);
  CHECK(log.errors().size() < 20000);
  CHECK_CONTAINS(log.errors(), "line number 0\n");
}

TEST(a_line_longer_than_any_buffer_is_cut) {
  LogCapture log;
  say(abi::LogLevel::kError, "%s", std::string(100000, 'x').c_str());
  CHECK(log.errors().size() < 3000);
}

TEST_MAIN()
