// The quota of CPU time that a cgroup, version 1 or 2, gives this process.
#pragma once

namespace untorch::threads {

// CPUs that the quota is worth, rounded up: 1 to `otherwise`, which is also the answer without a quota. Those of the
// groups above the process's own count, too.
// mount: where cgroups are mounted, /sys/fs/cgroup. membership: a file like /proc/self/cgroup; it may be missing.
int quota_cpus(const char* mount, const char* membership, int otherwise) noexcept;

}  // namespace untorch::threads
