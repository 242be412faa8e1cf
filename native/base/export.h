// Marks the functions that the library exports; everything else has hidden visibility.
#pragma once

#define UNTORCH_EXPORT __attribute__((visibility("default")))
