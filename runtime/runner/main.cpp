// SPDX-License-Identifier: BSD-3-Clause
// qnn_runner: runs a method of a .pte file without Python. Tensors are raw files: dense, little
// endian, of exactly the type and shape that the method declares.
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "memory/convert.h"
#include "session/session.h"

namespace executorch_qnn {
namespace {

constexpr char kUsage[] =
    "usage: qnn_runner --model FILE.pte [options]\n"
    "  --method NAME         the method to run (default: forward)\n"
    "  --inputs PATHS        a folder with input_0.bin, input_1.bin, ..., or the files "
    "themselves,\n"
    "                        separated by commas; an int or float input is a file of 8 bytes, a\n"
    "                        bool one of 1\n"
    "  --outputs DIR         write output_0.bin, output_1.bin, ... of the last run into this "
    "folder\n"
    "  --repeat N            run N times; mutable buffers go on from run to run (default: 1)\n"
    "  --state-in FILE       load the mutable buffers from a saved state first\n"
    "  --state-out FILE      save them at the end; may be the file of --state-in\n"
    "  --qnn-libraries DIR   folder of the QNN libraries (default: QNN_SDK_ROOT, then the system)\n"
    "  --print-times         print how long loading and each run took\n"
    "  --list                print the methods with their inputs and outputs, run nothing\n";

enum ExitCode { kOk = 0, kFailed = 1, kBadUsage = 2 };

struct Arguments {
  std::string model, method = "forward", inputs, outputs, state_in, state_out, libraries;
  long repeat = 1;
  bool print_times = false, list = false;
};

Status bad_usage(const std::string& message) { return {ErrorKind::kInvalid, message}; }

Result<Arguments> parse(int argc, char** argv) {
  Arguments arguments;
  const std::pair<const char*, std::string Arguments::*> texts[] = {
      {"--model", &Arguments::model},
      {"--method", &Arguments::method},
      {"--inputs", &Arguments::inputs},
      {"--outputs", &Arguments::outputs},
      {"--state-in", &Arguments::state_in},
      {"--state-out", &Arguments::state_out},
      {"--qnn-libraries", &Arguments::libraries}};
  const std::pair<const char*, bool Arguments::*> flags[] = {
      {"--print-times", &Arguments::print_times}, {"--list", &Arguments::list}};
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    const auto is_option = [&option](const auto& entry) { return option == entry.first; };
    const auto flag = std::find_if(std::begin(flags), std::end(flags), is_option);
    if (flag != std::end(flags)) {
      arguments.*flag->second = true;
      continue;
    }
    const auto text = std::find_if(std::begin(texts), std::end(texts), is_option);
    if (text == std::end(texts) && option != "--repeat") {
      return bad_usage("there is no option " + option);
    }
    if (++i == argc) return bad_usage("option " + option + " needs a value");
    if (text != std::end(texts)) {
      arguments.*text->second = argv[i];
      continue;
    }
    char* end = nullptr;
    arguments.repeat = std::strtol(argv[i], &end, 10);
    if (*end != 0 || arguments.repeat < 1) return bad_usage("--repeat takes a number from 1 on");
  }
  if (arguments.model.empty()) return bad_usage("--model is missing");
  return arguments;
}

// ------------------------------------------------------------------------------------- files

bool is_folder(const std::string& path) {
  struct stat info{};
  return stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

std::vector<std::string> input_files(const std::string& given, size_t count) {
  std::vector<std::string> files;
  if (is_folder(given)) {
    for (size_t i = 0; i < count; ++i) {
      files.push_back(given + "/input_" + std::to_string(i) + ".bin");
    }
  } else {
    std::istringstream list(given);
    for (std::string file; std::getline(list, file, ',');) files.push_back(file);
  }
  return files;
}

Result<std::string> read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(file)), {});
  if (!file.good() && !file.eof()) return Status(ErrorKind::kIo, "cannot read " + path);
  return bytes;
}

Status write_file(const std::string& path, const void* data, size_t size) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(static_cast<const char*>(data), static_cast<std::streamsize>(size));
  file.close();
  if (!file) return {ErrorKind::kIo, "cannot write " + path};
  return {};
}

// ------------------------------------------------------------------------------------- values

size_t bytes_of(const ValueInfo& info) {
  size_t bytes = element_bytes(static_cast<ScalarType>(info.type));
  for (int32_t dim : info.dims) bytes *= static_cast<size_t>(dim);
  return bytes;
}

std::string describe(const ValueInfo& info) {
  if (info.kind == ValueKind::kInt) return "int";
  if (info.kind == ValueKind::kDouble) return "float";
  if (info.kind == ValueKind::kBool) return "bool";
  if (info.kind != ValueKind::kTensor) return "other";
  return describe(static_cast<ScalarType>(info.type),
                  std::vector<uint32_t>(info.dims.begin(), info.dims.end()));
}

template <class T>
Result<InputValue> scalar_input(const std::string& bytes, const std::string& file) {
  T value{};
  if (bytes.size() != sizeof value) {
    return Status(ErrorKind::kState, file + " has " + std::to_string(bytes.size()) +
                                         " bytes, the input takes " + std::to_string(sizeof value));
  }
  std::memcpy(&value, bytes.data(), sizeof value);
  return InputValue(value);
}

// `bytes` stays where it is while the value is used.
Result<InputValue> to_input(const ValueInfo& info, const std::string& bytes,
                            const std::string& file) {
  switch (info.kind) {
    case ValueKind::kTensor:
      if (bytes.size() != bytes_of(info)) {
        return Status(ErrorKind::kState, file + " has " + std::to_string(bytes.size()) +
                                             " bytes, " + describe(info) + " takes " +
                                             std::to_string(bytes_of(info)));
      }
      return InputValue(TensorView{bytes.data(), bytes.size(), info.type, info.dims});
    case ValueKind::kInt:
      return scalar_input<int64_t>(bytes, file);
    case ValueKind::kDouble:
      return scalar_input<double>(bytes, file);
    case ValueKind::kBool:
      return scalar_input<bool>(bytes, file);
    default:
      return InputValue(std::monostate());
  }
}

Status write_output(const std::string& path, const ValueInfo& info, const OutputValue& output) {
  if (info.kind == ValueKind::kTensor) {
    return write_file(path, output.data, bytes_of({info.kind, output.type, output.dims}));
  }
  return std::visit(
      [&path](const auto& value) -> Status {
        using T = std::decay_t<decltype(value)>;
        if constexpr (std::is_same_v<T, std::monostate>) {
          return write_file(path, "", 0);
        } else if constexpr (std::is_same_v<T, std::string>) {
          return write_file(path, value.data(), value.size());
        } else {
          return write_file(path, &value, sizeof value);
        }
      },
      output.scalar);
}

// ------------------------------------------------------------------------------------- commands

class Stopwatch {
 public:
  double milliseconds() const {
    const auto passed = std::chrono::steady_clock::now() - start_;
    return std::chrono::duration<double, std::milli>(passed).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

Status list(const ProgramFile& program) {
  for (const std::string& name : program.methods()) {
    ETQNN_ASSIGN(const MethodInfo info, program.method(name));
    std::printf("%s(", name.c_str());
    for (size_t i = 0; i < info.inputs.size(); ++i) {
      std::printf("%s%s", i > 0 ? ", " : "", describe(info.inputs[i]).c_str());
    }
    std::printf(") ->");
    for (const ValueInfo& output : info.outputs) std::printf(" %s", describe(output).c_str());
    std::printf("\n");
  }
  return {};
}

Status run(const Arguments& arguments) {
  const Stopwatch loading;
  ETQNN_ASSIGN(const std::shared_ptr<const ProgramFile> program,
               ProgramFile::open(arguments.model, {arguments.libraries, false}));
  if (arguments.list) return list(*program);
  ETQNN_ASSIGN(const MethodInfo info, program->method(arguments.method));

  const std::vector<std::string> files = input_files(arguments.inputs, info.inputs.size());
  if (files.size() != info.inputs.size()) {
    return {ErrorKind::kState, "method " + arguments.method + " takes " +
                                   std::to_string(info.inputs.size()) + " inputs, got " +
                                   std::to_string(files.size()) + " files"};
  }
  std::vector<std::string> input_bytes;
  for (const std::string& file : files) {
    ETQNN_ASSIGN(std::string bytes, read_file(file));
    input_bytes.push_back(std::move(bytes));
  }
  std::vector<InputValue> inputs;
  for (size_t i = 0; i < files.size(); ++i) {
    ETQNN_ASSIGN(InputValue value, to_input(info.inputs[i], input_bytes[i], files[i]));
    inputs.push_back(std::move(value));
  }
  std::vector<OutputValue> outputs(info.outputs.size());
  std::vector<std::string> output_bytes(info.outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (info.outputs[i].kind != ValueKind::kTensor) continue;
    output_bytes[i].resize(bytes_of(info.outputs[i]));
    outputs[i].data = output_bytes[i].data();
    outputs[i].capacity = output_bytes[i].size();
  }

  ETQNN_ASSIGN(const std::shared_ptr<Session> session, Session::create(program));
  if (!arguments.state_in.empty()) ETQNN_TRY(session->load_state(arguments.state_in));
  if (arguments.print_times) std::printf("load %.3f ms\n", loading.milliseconds());

  std::vector<double> times;
  for (long i = 0; i < arguments.repeat; ++i) {
    const Stopwatch running;
    ETQNN_TRY(session->run(arguments.method, inputs, outputs));
    times.push_back(running.milliseconds());
  }
  if (arguments.print_times) {
    std::sort(times.begin(), times.end());
    std::printf("run min %.3f ms, median %.3f ms, max %.3f ms, of %zu\n", times.front(),
                times[times.size() / 2], times.back(), times.size());
  }
  if (!arguments.outputs.empty()) {
    mkdir(arguments.outputs.c_str(), 0777);  // if it is neither there nor made, writing says so
    for (size_t i = 0; i < outputs.size(); ++i) {
      const std::string path = arguments.outputs + "/output_" + std::to_string(i) + ".bin";
      ETQNN_TRY(write_output(path, info.outputs[i], outputs[i]));
    }
  }
  if (!arguments.state_out.empty()) ETQNN_TRY(session->save_state(arguments.state_out));
  return {};
}

}  // namespace
}  // namespace executorch_qnn

int main(int argc, char** argv) {
  using namespace executorch_qnn;
  std::signal(SIGXFSZ, SIG_IGN);  // a file that may not grow is an error that is reported
  if (argc == 2 && std::strcmp(argv[1], "--help") == 0) {
    std::fputs(kUsage, stdout);
    return kOk;
  }
  const Result<Arguments> arguments = parse(argc, argv);
  if (!arguments.ok()) {
    std::fprintf(stderr, "qnn_runner: %s\n%s", arguments.status().message().c_str(), kUsage);
    return kBadUsage;
  }
  if (const Status status = run(arguments.value()); !status.ok()) {
    std::fprintf(stderr, "qnn_runner: %s\n", status.message().c_str());
    return kFailed;
  }
  return kOk;
}
