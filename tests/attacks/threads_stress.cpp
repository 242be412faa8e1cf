// Several callers run exercise() of openmp.cpp on the pool, without a model around it: for ThreadSanitizer.
#include <cstdint>
#include <cstdio>
#include <thread>
#include <vector>

#include "threads/call.h"

extern "C" void exercise(int what);

namespace threads = untorch::threads;

extern "C" void aoti_torch_check(bool condition, const char*, const char*, std::uint32_t, const char* message) {
  if (condition) return;
  if (threads::in_generated_region()) {
    threads::fail_call(untorch::ErrorKind::kModel, message);
    threads::leave_region();
  }
  throw untorch::Error(untorch::ErrorKind::kModel, message);
}

int main() {
  std::atomic<int> wrong{0};
  const auto call = [&] {
    for (int round = 0; round < 15; ++round) {
      for (const int what : {1, 2, 3, 4, 5, 6, 8, 1}) {
        const bool expected = what != 1;
        threads::Call current;
        exercise(what);
        if (current.report() != expected) ++wrong;
      }
    }
  };
  std::vector<std::thread> callers;
  for (int i = 0; i < 5; ++i) callers.emplace_back(call);
  for (std::thread& caller : callers) caller.join();
  call();
  std::puts(wrong == 0 ? "right" : "wrong");
}
