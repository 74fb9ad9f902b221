// SPDX-License-Identifier: BSD-3-Clause
// A test program in one header:
//
//   TEST(adding_works) {
//     CHECK(1 + 1 == 2);
//     CHECK_EQ(add(1, 1), 2);
//   }
//   TEST_MAIN()
//
// A failed check is printed and ends its test. SKIP_ALL(reason) in a test ends the program with the
// code that CTest counts as skipped.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

namespace check {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline bool add(const char* name, void (*run)()) {
  tests().push_back({name, run});
  return true;
}

struct Failure {};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  throw Failure{};
}

template <class T>
std::string show(const T& value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

// Runs every test, or those whose name contains the first argument.
inline int run_all(int argc, char** argv) {
  int failed = 0;
  for (const Test& test : tests()) {
    if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) continue;
    bool passed = true;
    try {
      test.run();
    } catch (const Failure&) {
      passed = false;
    }
    std::fprintf(stderr, "%s %s\n", passed ? "ok    " : "FAILED", test.name);
    failed += passed ? 0 : 1;
  }
  return failed == 0 ? 0 : 1;
}

}  // namespace check

#define TEST(name)                                             \
  static void name();                                          \
  static const bool name##_added = ::check::add(#name, &name); \
  static void name()

#define TEST_MAIN() \
  int main(int argc, char** argv) { return ::check::run_all(argc, argv); }

#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) ::check::fail(__FILE__, __LINE__, "not true: " #condition); \
  } while (false)

#define CHECK_EQ(actual, expected)                                                 \
  do {                                                                             \
    const auto check_actual = (actual);                                            \
    const auto check_expected = (expected);                                        \
    if (!(check_actual == check_expected)) {                                       \
      ::check::fail(__FILE__, __LINE__,                                            \
                    #actual " is " + ::check::show(check_actual) + ", expected " + \
                        ::check::show(check_expected));                            \
    }                                                                              \
  } while (false)

#define CHECK_CONTAINS(text, part)                                                             \
  do {                                                                                         \
    const std::string check_text = (text);                                                     \
    if (check_text.find(part) == std::string::npos) {                                          \
      ::check::fail(__FILE__, __LINE__, "no \"" + std::string(part) + "\" in: " + check_text); \
    }                                                                                          \
  } while (false)

// Of a Status.
#define CHECK_OK(status)                                                        \
  do {                                                                          \
    const ::executorch_qnn::Status check_status = (status);                     \
    if (!check_status.ok())                                                     \
      ::check::fail(__FILE__, __LINE__, #status ": " + check_status.message()); \
  } while (false)

// Declares `target` as the value of a Result.
#define CHECK_VALUE(target, result)   \
  auto target##_result = (result);    \
  CHECK_OK(target##_result.status()); \
  auto& target = target##_result.value()

#define SKIP_ALL(reason)                             \
  do {                                               \
    std::fprintf(stderr, "skipped: %s\n", (reason)); \
    std::exit(77);                                   \
  } while (false)
