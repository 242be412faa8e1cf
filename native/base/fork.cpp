// The handlers that pthread_atfork calls.
#include "base/fork.h"

#include <pthread.h>

#include <cstddef>
#include <shared_mutex>

namespace untorch::fork {

constinit std::atomic<unsigned> detail::generation{0};

namespace {

constexpr int kMostHandlers = 8;
using Handler = void (*)() noexcept;
constinit Handler handlers[kMostHandlers] = {};
constinit int num_handlers = 0;

// Never destroyed: threads may run when the process exits.
alignas(std::shared_mutex) std::byte gate_memory[sizeof(std::shared_mutex)];
alignas(std::mutex) std::byte renewal_memory[sizeof(std::mutex)];
std::shared_mutex& gate() noexcept {
  static std::shared_mutex* const made = new (gate_memory) std::shared_mutex;
  return *made;
}

void before_fork() { gate().lock(); }
void in_parent() { gate().unlock(); }
void in_child() {
  // Their states count threads that do not exist here.
  new (gate_memory) std::shared_mutex;
  new (renewal_memory) std::mutex;
  detail::generation.fetch_add(1, std::memory_order_relaxed);
  for (int i = 0; i < num_handlers; ++i) handlers[i]();
}

[[maybe_unused]] const int registered = pthread_atfork(before_fork, in_parent, in_child);

}  // namespace

void at_child(void (*handler)() noexcept) noexcept {
  if (num_handlers < kMostHandlers) handlers[num_handlers++] = handler;
}

std::mutex& renewal() noexcept {
  static std::mutex* const made = new (renewal_memory) std::mutex;
  return *made;
}

Uncut::Uncut() { gate().lock_shared(); }
Uncut::~Uncut() { gate().unlock_shared(); }

}  // namespace untorch::fork
