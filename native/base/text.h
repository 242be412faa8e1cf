// Text from files, made safe to print.
#pragma once

#include <string>
#include <string_view>

namespace untorch {

// The text with control characters as escapes: ESC as "\x1b", U+202E (right to left override) as "\u202e". That are C0
// and C1, line and paragraph separators, and the characters that have no width or change the direction. Bytes that are
// no UTF-8 stay: paths may have them. keep_lines: \n and \t stay, too.
std::string escape_controls(std::string_view text, bool keep_lines);

}  // namespace untorch
