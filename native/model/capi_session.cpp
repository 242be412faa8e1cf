// untorch.h: sessions.
#include "model/capi_handles.h"

using untorch::check;
using namespace untorch::capi;

struct untorch_session {
  explicit untorch_session(std::unique_ptr<untorch::Session> made) : session(std::move(made)) {
    for (const auto& method : session->methods()) {
      methods.push_back(std::make_unique<untorch_method>(method.get()));
    }
  }
  std::unique_ptr<untorch::Session> session;
  std::vector<std::unique_ptr<untorch_method>> methods;
};

namespace {

untorch::MutableBuffers& buffers_of(untorch_program* program, untorch_session* session) {
  check(program != nullptr || session != nullptr, "expected a session or a program, both are null");
  return session != nullptr ? session->session->buffers() : program->program->buffers();
}

}  // namespace

extern "C" {

untorch_status untorch_program_session(untorch_program* program, untorch_session** out) {
  return guarded([&] {
    check(program != nullptr && out != nullptr, "untorch_program_session: program and out must not be null");
    *out = new untorch_session(program->program->session());
  });
}

untorch_method* untorch_session_method(const untorch_session* session, size_t index) {
  return index < session->methods.size() ? session->methods[index].get() : nullptr;
}

untorch_status untorch_session_reset(untorch_program* program, untorch_session* session) {
  return guarded([&] { buffers_of(program, session).reset(); });
}

untorch_status untorch_session_fork(untorch_program* program, untorch_session* session, untorch_session** out) {
  return guarded([&] {
    check(program != nullptr && out != nullptr, "untorch_session_fork: program and out must not be null");
    *out = new untorch_session(
        std::make_unique<untorch::Session>(program->program->methods(), buffers_of(program, session).fork()));
  });
}

size_t untorch_session_nbytes(const untorch_session* session) { return session->session->buffers().nbytes(); }

void untorch_session_close(untorch_session* session) {
  if (session != nullptr) session->session->close();
}

void untorch_session_free(untorch_session* session) {
  untorch_session_close(session);
  delete session;
}

}  // extern "C"
