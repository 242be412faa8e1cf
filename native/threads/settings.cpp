// OMP_NUM_THREADS, UNTORCH_SPIN_US, the CPU affinity and the cgroup's quota.
#include "threads/settings.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>

#include "threads/cgroup.h"

namespace untorch::threads {
namespace {

constexpr long kSpinMicroseconds = 100;

// The first number of a variable, such as 4 of "4,2"; `otherwise` for everything that OpenMP would not take.
long number(const char* name, long low, long high, long otherwise) noexcept {
  const char* text = std::getenv(name);
  if (text == nullptr) return otherwise;
  char* end = nullptr;
  errno = 0;
  const long value = std::strtol(text, &end, 10);
  while (*end == ' ') ++end;
  if (end == text || errno != 0 || (*end != '\0' && *end != ',') || value < low) return otherwise;
  return std::min(value, high);
}

int affinity() noexcept {
  // The set may be larger than cpu_set_t on machines with more than 1024 CPUs.
  for (int size = CPU_SETSIZE; size <= 1 << 18; size *= 2) {
    const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(CPU_ALLOC(size), [](cpu_set_t* s) { CPU_FREE(s); });
    if (!set) break;
    if (sched_getaffinity(0, CPU_ALLOC_SIZE(size), set.get()) == 0) {
      return std::max(1, CPU_COUNT_S(CPU_ALLOC_SIZE(size), set.get()));
    }
    if (errno != EINVAL) break;
  }
  return static_cast<int>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)));
}

Settings read() noexcept {
  Settings made{};
  made.cpus = quota_cpus("/sys/fs/cgroup", "/proc/self/cgroup", affinity());
  const int limit = static_cast<int>(number("OMP_THREAD_LIMIT", 1, kMaxThreads, kMaxThreads));
  made.num_threads = std::min(limit, static_cast<int>(number("OMP_NUM_THREADS", 1, kMaxThreads, made.cpus)));
  made.max_workers = std::min(limit - 1, std::max(64, 4 * made.cpus));
  made.spin_ns = 1000 * number("UNTORCH_SPIN_US", 0, kMaxSpinMicroseconds, kSpinMicroseconds);
  return made;
}

}  // namespace

const Settings& settings() noexcept {
  static const Settings made = read();
  return made;
}

}  // namespace untorch::threads
