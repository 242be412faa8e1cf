// Whether this machine runs a method's code, and on which device.
#pragma once

#include <string>

#include "model/manifest.h"

namespace untorch {

// "cuda" for "cuda:1".
std::string device_kind(const std::string& device);

// The device of a method of the file at `path`: `device` as load was given it, or the method's own. Of code for several
// GPU architectures it takes that for this GPU. Throws kUnsupported if the machine runs none of it.
// `beside_cuda`: the file has methods for CUDA, and "cuda:1" says on which GPU those run.
Device fit_to_machine(const std::string& path, MethodSpec& spec, const std::string& device, bool beside_cuda);

}  // namespace untorch
