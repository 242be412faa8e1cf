// A list of regions that a signal handler can read without a lock: nodes are reused, and never freed.
#include "base/watched_mapping.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <mutex>

#include "base/fork.h"

namespace untorch {

// Written under the mutex; `version` is odd meanwhile, so that the handler never takes one region's start with another
// one's end.
struct MappedRegion {
  std::atomic<unsigned> version{0};
  std::atomic<std::size_t> start{0}, end{0};  // both 0: free
  std::atomic<bool> truncated{false};
  MappedRegion* next = nullptr;
};

namespace {

fork::Mutex& mutex() {
  static auto& made = *new fork::Mutex;
  return made;
}

struct sigaction before;  // written once, before the handler is there
std::size_t page_size;

std::atomic<MappedRegion*> regions{nullptr};

static_assert(std::atomic<std::size_t>::is_always_lock_free && std::atomic<MappedRegion*>::is_always_lock_free);

// True when the address lies in a region, which has zeros from its page on now.
bool put_zeros(std::size_t address) noexcept {
  for (MappedRegion* region = regions.load(std::memory_order_acquire); region != nullptr; region = region->next) {
    const unsigned version = region->version.load(std::memory_order_acquire);
    const std::size_t start = region->start.load(std::memory_order_acquire);
    const std::size_t end = region->end.load(std::memory_order_acquire);
    if ((version & 1u) != 0 || region->version.load(std::memory_order_acquire) != version) continue;
    if (address < start || address >= end) continue;
    const std::size_t page = address & ~(page_size - 1);
    void* const zeros = mmap(reinterpret_cast<void*>(page), end - page, PROT_READ,
                             MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (zeros == MAP_FAILED) return false;
    region->truncated.store(true, std::memory_order_release);
    return true;
  }
  return false;
}

void on_bus_error(int signal, siginfo_t* info, void* context) {
  const int saved = errno;
  // BUS_ADRERR alone: a kill() has no address, and a machine check must end the process.
  const bool handled = info->si_code == BUS_ADRERR && put_zeros(reinterpret_cast<std::uintptr_t>(info->si_addr));
  errno = saved;
  if (handled) return;
  if ((before.sa_flags & SA_SIGINFO) != 0) {
    before.sa_sigaction(signal, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(signal);
  } else if (before.sa_handler == SIG_DFL || info->si_code > 0) {
    // The default, also where the signal is ignored: a fault cannot be. It comes again when this returns.
    struct sigaction fallback {};
    fallback.sa_handler = SIG_DFL;
    (void)sigaction(SIGBUS, &fallback, nullptr);
    if (info->si_code <= 0) (void)raise(SIGBUS);  // sent by somebody: nothing would bring it again
  }
}

void install() {
  static bool done = false;
  if (done) return;
  done = true;
  page_size = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  (void)sigaction(SIGBUS, nullptr, &before);
  struct sigaction ours {};
  ours.sa_sigaction = on_bus_error;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  (void)sigemptyset(&ours.sa_mask);
  (void)sigaction(SIGBUS, &ours, nullptr);
}

}  // namespace

WatchedMapping::WatchedMapping(const void* data, std::size_t size) {
  const std::lock_guard lock(mutex());
  install();
  MappedRegion* free = regions.load(std::memory_order_relaxed);
  while (free != nullptr && free->end.load(std::memory_order_relaxed) != 0) free = free->next;
  const bool is_new = free == nullptr;
  if (is_new) free = new MappedRegion;
  const auto start = reinterpret_cast<std::size_t>(data);
  free->version.fetch_add(1, std::memory_order_acq_rel);
  free->truncated.store(false, std::memory_order_release);
  free->start.store(start, std::memory_order_release);
  free->end.store((start + size + page_size - 1) & ~(page_size - 1), std::memory_order_release);
  free->version.fetch_add(1, std::memory_order_acq_rel);
  if (is_new) {
    free->next = regions.load(std::memory_order_relaxed);
    regions.store(free, std::memory_order_release);
  }
  region_ = free;
}

WatchedMapping::~WatchedMapping() {
  const std::lock_guard lock(mutex());
  region_->version.fetch_add(1, std::memory_order_acq_rel);
  region_->start.store(0, std::memory_order_release);
  region_->end.store(0, std::memory_order_release);
  region_->version.fetch_add(1, std::memory_order_acq_rel);
}

bool WatchedMapping::truncated() const noexcept { return region_->truncated.load(std::memory_order_acquire); }

}  // namespace untorch
