// Whether float32 operands may be rounded to TF32 (10 bits of mantissa), for the tensor cores.
#pragma once

namespace untorch::cuda {

// As the file's exporter had it, operator by operator.
struct Tf32 {
  bool convolution = false, matmul = false;
};

// What holds for operators that run on this thread: the process's setting if there is one, else the call's.
Tf32 tf32() noexcept;
// For the process from now on; until then UNTORCH_ALLOW_TF32=0 or 1 in the environment does the same.
void allow_tf32(bool allowed) noexcept;

// The call's setting while it lives.
class Tf32Scope {
 public:
  explicit Tf32Scope(Tf32 allowed) noexcept;
  ~Tf32Scope();
  Tf32Scope(const Tf32Scope&) = delete;
  Tf32Scope& operator=(const Tf32Scope&) = delete;

 private:
  Tf32 before_;
};

}  // namespace untorch::cuda
