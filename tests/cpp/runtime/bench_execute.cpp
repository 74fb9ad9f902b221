// SPDX-License-Identifier: BSD-3-Clause
// What the delegate itself costs: bench_execute BUFFERS EXECUTIONS runs a decode-like graph on the
// null provider and prints microseconds per execution. benchmarks/execute.py counts instructions
// with it.
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "delegate/store_registry.h"
#include "runtime/support.h"

using namespace support;

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const int buffers = std::atoi(argv[1]);
  const int executions = std::atoi(argv[2]);
  std::vector<PayloadState> states;
  for (int i = 0; i < buffers; ++i) {
    states.push_back(state("layers." + std::to_string(i) + ".cache", StateBinding::kInPlace,
                           {1, 3, 128, 64}, ScalarType::kFloat32, abi::DataType::kFloat16));
  }
  Program program({payload("forward_0", states,
                           {tensor("tokens", ScalarType::kInt64, abi::DataType::kInt32, {1, 1}),
                            tensor("start_pos", ScalarType::kInt64, abi::DataType::kInt32, {1})},
                           {tensor("y", ScalarType::kInt32, abi::DataType::kInt32, {1, 4})})},
                  null_qnn::kNothing);
  Load load;
  Delegate delegate(program, 0, load);
  if (!delegate.failure.ok()) return 1;
  Arg tokens(ScalarType::kInt64, {1, 1}), start(ScalarType::kInt64, {1});
  Arg y(ScalarType::kInt32, {1, 4});
  std::vector<et::EValue*> args{&tokens.value, &start.value, &y.value};
  double best = 1e9;
  for (int i = 0; i < executions; ++i) {
    const auto before = std::chrono::steady_clock::now();
    if (delegate.execute(args) != et::Error::Ok) return 1;
    const std::chrono::duration<double, std::micro> took =
        std::chrono::steady_clock::now() - before;
    best = std::min(best, took.count());
  }
  std::printf("%.3f\n", best);
  return 0;
}
