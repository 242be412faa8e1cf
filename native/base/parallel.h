// A loop over independent pieces of work on a few threads of its own, for work that takes milliseconds or more.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace untorch {

// Calls work(i) for every i below `count` on `threads` threads, the caller's among them; 0: one a core, at most eight.
// The first failure is thrown when all are done.
template <class Work>
void for_each_parallel(std::size_t count, unsigned threads, const Work& work) {
  constexpr unsigned kMost = 8;
  if (threads == 0) threads = std::min(std::max(std::thread::hardware_concurrency(), 1u), kMost);
  std::atomic<std::size_t> next{0};
  std::exception_ptr failure;
  std::mutex mutex;
  const auto run = [&]() noexcept {
    try {
      for (std::size_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) work(i);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!failure) failure = std::current_exception();
      next.store(count);
    }
  };
  std::vector<std::thread> others;
  try {
    for (std::size_t i = 1; i < std::min<std::size_t>(threads, count); ++i) others.emplace_back(run);
  } catch (const std::system_error&) {  // no more threads: those that there are do it
  }
  run();
  for (std::thread& thread : others) thread.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace untorch
