// Functions of other libraries that libuntorch.so serves to model libraries under names of its own.
#pragma once

#include <string>
#include <string_view>

namespace untorch {

// The name that an undefined symbol of a model library gets in the copy that is opened, of the same length: the
// function of the usual name may be in the process too, and would be found first. Empty for every other symbol.
std::string own_name(std::string_view symbol);

}  // namespace untorch
