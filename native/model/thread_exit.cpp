// A list for each thread, all under one mutex: a thread that ends and a library that is closed take turns.
#include "model/thread_exit.h"

#include <pthread.h>

#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <vector>

#include "base/export.h"
#include "base/fork.h"

namespace untorch {
namespace {

struct Destructor {
  void (*function)(void*);
  void* object;
  std::uintptr_t library;  // an address in it

  void run() const { function(object); }
};

using List = std::vector<Destructor>;

struct Table {
  // Recursive, as a destructor may register another object. Held while destructors run: the library of one that runs
  // must not be closed.
  std::recursive_mutex mutex;
  std::vector<std::unique_ptr<List>> threads;
  // A key, because its destructors run after those of C++ thread_local objects, which may still call a model.
  pthread_key_t key;
  bool has_key;

  Table();
};

// Never destroyed: threads may end after static destructors have run.
Table& table() {
  static auto& made = *new Table;
  return made;
}

void run_at_thread_end(void* value) {
  auto* const list = static_cast<List*>(value);
  Table& all = table();
  const fork::Uncut uncut;
  const std::lock_guard lock(all.mutex);
  (void)pthread_setspecific(all.key, list);  // for objects that the destructors make
  while (!list->empty()) {
    const Destructor last = list->back();
    list->pop_back();
    last.run();
  }
  (void)pthread_setspecific(all.key, nullptr);
  std::erase_if(all.threads, [&](const auto& item) { return item.get() == list; });
}

// Other threads do not exist in the child, and their objects' memory is used again.
void keep_own_thread() noexcept {
  Table& all = table();
  new (&all.mutex) std::recursive_mutex;
  const void* const own = pthread_getspecific(all.key);
  std::erase_if(all.threads, [&](const auto& item) { return item.get() != own; });
}

// The library's last one, no longer in its list. Looked for anew each time, as destructors may add to the lists.
std::optional<Destructor> take_last(std::uintptr_t start, std::uintptr_t end) noexcept {
  for (const auto& list : table().threads) {
    for (auto it = list->end(); it != list->begin();) {
      const Destructor found = *--it;
      if (found.library < start || found.library >= end) continue;
      list->erase(it);
      return found;
    }
  }
  return std::nullopt;
}

Table::Table() { has_key = pthread_key_create(&key, run_at_thread_end) == 0; }

[[maybe_unused]] const bool registered = (fork::at_child(keep_own_thread), true);

}  // namespace

void destroy_thread_locals(std::uintptr_t start, std::uintptr_t end) noexcept {
  const fork::Uncut uncut;
  const std::lock_guard lock(table().mutex);
  while (const std::optional<Destructor> last = take_last(start, end)) last->run();
}

}  // namespace untorch

// __cxa_thread_atexit (Itanium C++ ABI) and __cxa_thread_atexit_impl (glibc) for model libraries.
extern "C" UNTORCH_EXPORT int utcxx_thread_atexit(void (*destructor)(void*), void* object, void* library) {
  using namespace untorch;
  try {
    Table& all = table();
    const fork::Uncut uncut;  // before the mutex, as everywhere
    const std::lock_guard lock(all.mutex);
    if (!all.has_key) return -1;
    auto* list = static_cast<List*>(pthread_getspecific(all.key));
    if (list == nullptr) {
      all.threads.push_back(std::make_unique<List>());
      list = all.threads.back().get();
      if (pthread_setspecific(all.key, list) != 0) {
        all.threads.pop_back();
        return -1;
      }
    }
    list->push_back({destructor, object, reinterpret_cast<std::uintptr_t>(library)});
    return 0;
  } catch (...) {
    return -1;  // no memory: the object is not destroyed
  }
}

extern "C" UNTORCH_EXPORT int utcxx_thread_atexit_impl(void (*destructor)(void*), void* object, void* library) {
  return utcxx_thread_atexit(destructor, object, library);
}
