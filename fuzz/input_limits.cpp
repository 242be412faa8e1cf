// A CPU timer, and AddressSanitizer's allocation hooks.
#include "input_limits.h"

#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

// sanitizer/allocator_interface.h, which GCC does not bring.
extern "C" int __sanitizer_install_malloc_and_free_hooks(void (*on_malloc)(const volatile void*, std::size_t),
                                                         void (*on_free)(const volatile void*));
extern "C" std::size_t __sanitizer_get_allocated_size(const volatile void* pointer);

namespace untorch::fuzz {
namespace {

std::atomic<bool> counting{false};
std::atomic<std::size_t> live{0};

void on_timer(int) { finding("the input takes more than a second of CPU time"); }

void on_malloc(const volatile void*, std::size_t size) {
  if (!counting.load(std::memory_order_relaxed)) return;
  if (live.fetch_add(size, std::memory_order_relaxed) + size <= kMaxBytes) return;
  counting.store(false);
  finding("the input takes more than 256 MB");
}

void on_free(const volatile void* pointer) {
  if (!counting.load(std::memory_order_relaxed) || pointer == nullptr) return;
  const std::size_t size = __sanitizer_get_allocated_size(pointer);
  // What was there before the input came is not counted.
  std::size_t now = live.load(std::memory_order_relaxed);
  while (!live.compare_exchange_weak(now, now > size ? now - size : 0, std::memory_order_relaxed)) {
  }
}

void set_timer(unsigned seconds) noexcept {
  itimerval value{};
  value.it_value.tv_sec = seconds;
  (void)setitimer(ITIMER_VIRTUAL, &value, nullptr);
}

}  // namespace

Limits::Limits() noexcept {
  static const bool installed = [] {
    struct sigaction action {};
    action.sa_handler = on_timer;
    (void)sigaction(SIGVTALRM, &action, nullptr);
    return __sanitizer_install_malloc_and_free_hooks(on_malloc, on_free) != 0;
  }();
  if (!installed) finding("the allocation hooks cannot be installed");
  live.store(0);
  counting.store(true);
  set_timer(kMaxSeconds);
}

Limits::~Limits() {
  set_timer(0);
  counting.store(false);
}

void finding(const char* what) noexcept {
  for (const char* text : {"FINDING: ", what, "\n"}) (void)!write(STDERR_FILENO, text, std::strlen(text));
  std::abort();
}

}  // namespace untorch::fuzz
