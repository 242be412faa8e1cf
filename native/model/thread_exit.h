// thread_local objects of model libraries: their destructors run when the thread ends or when the library is closed,
// whichever comes first. glibc's own __cxa_thread_atexit keeps a library mapped until every such thread has ended, so a
// thread that loads and closes models would map more and more.
#pragma once

#include <cstdint>

namespace untorch {

// Destroys the thread_local objects, in all threads, of the library that is mapped at [start, end). None of its code
// may be running; afterwards dlclose unmaps it.
void destroy_thread_locals(std::uintptr_t start, std::uintptr_t end) noexcept;

}  // namespace untorch
