// Threads that outlive the interpreter.
#include "gil.h"

#include <unistd.h>

namespace untorch::python {

void sleep_forever() noexcept {
  for (;;) pause();
}

}  // namespace untorch::python
