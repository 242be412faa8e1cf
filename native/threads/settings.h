// What the environment and the machine say about threads; read once.
#pragma once

namespace untorch::threads {

// The largest team, and the most workers.
inline constexpr int kMaxThreads = 1024;
inline constexpr int kMaxSpinMicroseconds = 1'000'000;

struct Settings {
  int cpus;         // that this process may run on (sched_getaffinity), or its cgroup's quota if that is less
  int num_threads;  // of a team: OMP_NUM_THREADS, else `cpus`
  int max_workers;  // made without an explicit request for more
  long spin_ns;     // that a thread looks for work before it sleeps: UNTORCH_SPIN_US, else 100 µs
};

const Settings& settings() noexcept;

}  // namespace untorch::threads
