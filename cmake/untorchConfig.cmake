# find_package(untorch): targets with the headers and libraries of an installed untorch.
#   untorch::untorch   libuntorch.so, and with it the caller's stream
#   untorch::stream    libuntorch_stream.so alone: untorch/caller_stream.h, for engines that do not use libuntorch
#   cmake -S . -B build -Duntorch_DIR="$(python -c 'import untorch; print(untorch.cmake_dir())')"
get_filename_component(_untorch "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
if(NOT TARGET untorch::stream)
  add_library(untorch::stream SHARED IMPORTED)
  set_target_properties(untorch::stream PROPERTIES
    IMPORTED_LOCATION "${_untorch}/libuntorch_stream.so"
    INTERFACE_INCLUDE_DIRECTORIES "${_untorch}/include")
endif()
if(NOT TARGET untorch::untorch)
  add_library(untorch::untorch SHARED IMPORTED)
  set_target_properties(untorch::untorch PROPERTIES
    IMPORTED_LOCATION "${_untorch}/libuntorch.so"
    INTERFACE_INCLUDE_DIRECTORIES "${_untorch}/include"
    INTERFACE_LINK_LIBRARIES untorch::stream
    INTERFACE_COMPILE_FEATURES cxx_std_17)
endif()
foreach(_untorch_file libuntorch.so libuntorch_stream.so include/untorch/untorch.h include/untorch/caller_stream.h)
  if(NOT EXISTS "${_untorch}/${_untorch_file}")
    set(untorch_FOUND FALSE)
    set(untorch_NOT_FOUND_MESSAGE "${_untorch}/${_untorch_file} does not exist: install untorch from a wheel")
  endif()
endforeach()
unset(_untorch_file)
unset(_untorch)
