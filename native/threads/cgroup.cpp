// Reads cpu.max, or cpu.cfs_quota_us and cpu.cfs_period_us, of a process's cgroups and of those above them.
#include "threads/cgroup.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>

namespace untorch::threads {
namespace {

using File = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

File open_file(const std::string& path) { return File(std::fopen(path.c_str(), "re"), std::fclose); }

// The number that a file begins with; 0 without one ("max").
long first_number(const std::string& path) {
  const File file = open_file(path);
  long value = 0;
  return file && std::fscanf(file.get(), "%ld", &value) == 1 ? value : 0;
}

// Of one group's folder; `otherwise` without a quota. Version 1 writes -1 for none.
long cpus_of(const std::string& folder, bool second_version, long otherwise) {
  long used = 0, period = 0;
  if (second_version) {
    const File file = open_file(folder + "/cpu.max");
    if (!file || std::fscanf(file.get(), "%ld %ld", &used, &period) != 2) return otherwise;
  } else {
    used = first_number(folder + "/cpu.cfs_quota_us");
    period = first_number(folder + "/cpu.cfs_period_us");
  }
  if (used <= 0 || period <= 0) return otherwise;
  return std::clamp((used - 1) / period + 1, 1L, otherwise);
}

// The least of a group and of those above it. In a container the path is often the host's, of which nothing but the
// group itself is mounted: folders that are missing have no quota.
long least_of(const std::string& base, std::string path, bool second_version, long least) {
  if (path.find("/..") != std::string::npos) path.clear();  // outside the cgroup namespace
  while (true) {
    least = cpus_of(base + path, second_version, least);
    const std::size_t slash = path.rfind('/');
    if (slash == std::string::npos) return least;
    path.resize(slash);
  }
}

// Whether "cpu" is in a list such as "cpu,cpuacct".
bool has_cpu(std::string_view controllers) {
  while (true) {
    const std::size_t comma = controllers.find(',');
    if (controllers.substr(0, comma) == "cpu") return true;
    if (comma == std::string_view::npos) return false;
    controllers.remove_prefix(comma + 1);
  }
}

long read_quota(const std::string& mount, const std::string& membership, long least) {
  least = cpus_of(mount, true, least);
  least = cpus_of(mount + "/cpu", false, least);
  const File file = open_file(membership);
  if (!file) return least;
  char buffer[8192];
  while (std::fgets(buffer, sizeof buffer, file.get()) != nullptr) {  // number:controllers:path
    std::string line(buffer);
    while (!line.empty() && (line.back() == '\n' || line.back() == '/')) line.pop_back();
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1), path = line.substr(second + 1);
    if (controllers.empty()) least = least_of(mount, path, true, least);
    if (!has_cpu(controllers)) continue;
    least = least_of(mount + "/cpu", path, false, least);
    least = least_of(mount + "/" + controllers, path, false, least);
  }
  return least;
}

}  // namespace

int quota_cpus(const char* mount, const char* membership, int otherwise) noexcept {
  try {
    return static_cast<int>(read_quota(mount, membership, otherwise));
  } catch (...) {  // no memory
    return otherwise;
  }
}

}  // namespace untorch::threads
