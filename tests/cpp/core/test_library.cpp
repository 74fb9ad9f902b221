// SPDX-License-Identifier: BSD-3-Clause
// Finding and loading libraries of all kinds; the fakes' tables end before memory that faults.
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "check.h"
#include "core/stdout_capture.h"
#include "qnn/backend.h"
#include "qnn/discovery.h"
#include "qnn/library.h"

namespace fs = std::filesystem;
using namespace executorch_qnn;

namespace {

std::string fake(const char* name) { return std::string(ETQNN_FAKE_QNN "/") + name; }

// Sets a variable of the environment for one test.
class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) {
    if (const char* old = getenv(name)) old_ = old;
    setenv(name, value.c_str(), 1);
  }
  ~Variable() { setenv(name_, old_.c_str(), 1); }

 private:
  const char* name_;
  std::string old_;
};

// No library anywhere.
struct Nothing {
  Variable root{"QNN_SDK_ROOT", ""};
  Variable path{"LD_LIBRARY_PATH", ""};
};

}  // namespace

// ------------------------------------------------------------------------------------- discovery

TEST(candidates_come_in_the_documented_order) {
  Variable root("QNN_SDK_ROOT", fake("core_2_36"));
  Variable path("LD_LIBRARY_PATH", "/nowhere:" + fake("core_2_99") + ":");
  LibrarySearch search = find_library("", {"/no/package", fake("core_2_40")});
  CHECK_EQ(search.found.size(), 3u);
  const char* const how[] = {"QNN_SDK_ROOT", "package", "system"};
  const char* const where[] = {"core_2_36", "core_2_40", "core_2_99"};
  for (size_t i = 0; i < 3; ++i) {
    CHECK_EQ(search.found[i].how, how[i]);
    CHECK_EQ(search.found[i].folder, fake(where[i]));
  }
}

TEST(a_given_path_is_the_only_place_looked_at) {
  Variable root("QNN_SDK_ROOT", fake("core_2_36"));
  LibrarySearch right = find_library(fake("core_2_40"), {fake("core_2_36")});
  CHECK_EQ(right.found.size(), 1u);
  CHECK_EQ(right.found[0].how, "argument");
  LibrarySearch wrong = find_library("/no/such/folder", {fake("core_2_36")});
  CHECK(wrong.found.empty());
}

TEST(an_sdk_root_stands_for_its_folder_of_this_machine) {
  fs::path root = fs::temp_directory_path() / ("sdk-" + std::to_string(getpid()));
  fs::path libraries = root / "lib/x86_64-linux-clang";
  fs::create_directories(libraries);
  std::ofstream(libraries / kHtpLibrary);
  LibrarySearch search = find_library(root.string(), {});
  fs::remove_all(root);
#ifdef __x86_64__
  CHECK_EQ(search.best().value().folder, libraries.string());
#endif
}

TEST(a_folder_that_is_named_twice_is_one_candidate) {
  Nothing nothing;
  CHECK_EQ(find_library("", {fake("core_2_40"), fake("core_2_40")}).found.size(), 1u);
}

TEST(finding_nothing_is_an_error_that_lists_the_places_and_a_way_out) {
  Nothing nothing;
  Variable root("QNN_SDK_ROOT", "/opt/no-sdk");
  Status status = find_library("", {"/no/package"}).best().status();
  CHECK(status.kind() == ErrorKind::kLibraryNotFound);
  for (const char* part : {"QNN_SDK_ROOT: /opt/no-sdk", "package: /no/package", "system:",
                           "pip install \"onnxruntime-qnn>=2.3,<2.8\"", "--qnn-libraries"}) {
    CHECK_CONTAINS(status.message(), part);
  }
}

// ------------------------------------------------------------------------------------- loading

TEST(tables_of_every_length_are_read_to_their_end_and_no_further) {
  const char* const folders[] = {"core_2_36", "core_2_40", "core_2_99"};
  const uint32_t minors[] = {36, 40, 99};
  for (int i = 0; i < 3; ++i) {
    CHECK_VALUE(library, Library::load(fake(folders[i])));
    CHECK_EQ(library->core_api().minor, minors[i]);
    CHECK_EQ(library->build_id(), "v2.fake");
    CHECK_EQ(library->provider(), "HTP_FAKE");
    CHECK(library->api().graph_execute != nullptr);
    CHECK(library->api().graph_validate == nullptr);
  }
}

TEST(a_folder_is_loaded_once) {
  CHECK_VALUE(one, Library::load(fake("core_2_40")));
  CHECK_VALUE(two, Library::load(fake("core_2_40") + "/../core_2_40/"));
  CHECK_EQ(one.get(), two.get());
}

TEST(other_versions_are_refused_with_both_versions_named) {
  for (const char* folder : {"core_2_35", "core_3_0"}) {
    Status status = Library::load(fake(folder)).status();
    CHECK(status.kind() == ErrorKind::kIncompatible);
    CHECK_CONTAINS(status.message(), folder[5] == '3' ? "3.0.0" : "2.35.0");
    CHECK_CONTAINS(status.message(), "2.36");
    CHECK_CONTAINS(status.message(), fake(folder));
  }
}

TEST(what_is_not_an_htp_library_is_refused) {
  CHECK_CONTAINS(Library::load(fake("gpu")).status().message(), "not an HTP backend");
  CHECK_CONTAINS(Library::load(fake("no_interface")).status().message(), "no QNN interface");
  Status text = Library::load(fake("not_a_library")).status();
  CHECK(text.kind() == ErrorKind::kLibraryNotFound);
  CHECK_CONTAINS(text.message(), "libQnnHtp.so");
}

TEST(a_missing_folder_and_no_folder_are_not_found) {
  Nothing nothing;
  CHECK(Library::load("/no/such/folder").status().kind() == ErrorKind::kLibraryNotFound);
  CHECK(Library::load("").status().kind() == ErrorKind::kLibraryNotFound);
}

TEST(the_system_library_is_optional_but_not_of_any_version) {
  CHECK_VALUE(without, Library::load(fake("core_2_99")));
  CHECK(without->system() == nullptr);
  CHECK_VALUE(with, Library::load(fake("core_2_40")));
  CHECK(with->system() != nullptr);
  CHECK_EQ(with->system_api().minor, 15u);
  Status status = Library::load(fake("system_2")).status();
  CHECK(status.kind() == ErrorKind::kIncompatible);
  CHECK_CONTAINS(status.message(), "2.15.0");
}

TEST(loading_prints_nothing) {
  // The fakes print when they are loaded; the captures below see what comes through. A folder that
  // was not loaded before, as loading happens once.
  int ends[2];
  CHECK_EQ(pipe(ends), 0);
  int real = dup(1);
  dup2(ends[1], 1);
  close(ends[1]);
  (void)Library::load(fake("gpu"));
  std::fflush(stdout);
  dup2(real, 1);
  close(real);
  char buffer[64];
  ssize_t count = read(ends[0], buffer, sizeof buffer);
  close(ends[0]);
  CHECK_EQ(count, 0);
}

// ------------------------------------------------------------------------------------- errors

TEST(an_error_tells_what_was_tried_the_code_its_name_and_a_way_out) {
  CHECK_VALUE(library, Library::load(fake("core_2_40")));
  LogCapture log;
  CHECK(library->check(0, "nothing", log).ok());
  Status status = library->check((uint64_t{7} << 32) | 5000, "loading it", log);
  CHECK(status.kind() == ErrorKind::kQnn);
  CHECK_EQ(status.code(), 5000u);
  for (const char* part :
       {"loading it failed", "5000", "FAKE_ERROR: something", "or a newer one"}) {
    CHECK_CONTAINS(status.message(), part);
  }
  CHECK_CONTAINS(library->check(1, "it", log).message(), "QNN error 1");
}

TEST_MAIN()
