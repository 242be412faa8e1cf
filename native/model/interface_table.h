// What a library was compiled for, as the exporter wrote it into the library itself, against what the manifest says:
// generated code checks neither its inputs nor its weights.
#pragma once

#include <optional>
#include <string>

#include "model/elf.h"
#include "model/json.h"
#include "model/manifest.h"

namespace untorch {

// The JSON text of the library's variable untorch_interface. None in stock packages and in libraries from before it.
// Throws kInvalidFile.
std::optional<json::Value> read_interface_table(const ElfImage& elf);

// Throws kInvalidFile, with `what` before it, if the method's inputs or constants are not those of the table, or if a
// constant that the code writes is said to be unchanged.
void check_interface(const json::Value& table, const MethodSpec& method, const std::string& what);

}  // namespace untorch
