// What operators that draw on the GPU share.
#pragma once

#include "cuda/random_state.h"
#include "shims/op.h"

namespace untorch::shims {

// launch(state, ctas) with what the draws for a tensor need; nothing for an empty one, as in PyTorch. A null generator
// is the process's.
template <class On, class Launch>
void draw(const Op& op, const On& on, const Tensor& t, int per_draw, kernels::Generator* generator, Launch&& launch) {
  if (t.numel() == 0) return;
  const auto& properties = on.properties();
  const kernels::cuda::RandomGrid grid =
      kernels::cuda::random_grid(t.numel(), per_draw, properties.num_sms, properties.max_threads_per_multiprocessor);
  on.launched(launch(cuda::reserve_random(generator, on.index(), on.stream(), grid.positions, op), grid.ctas));
}

}  // namespace untorch::shims
