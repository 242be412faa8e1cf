# find_package(untorch): the target untorch::untorch, with the headers and the library of an installed untorch.
#   cmake -S . -B build -Duntorch_DIR="$(python -c 'import untorch; print(untorch.cmake_dir())')"
get_filename_component(_untorch "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
if(NOT TARGET untorch::untorch)
  add_library(untorch::untorch SHARED IMPORTED)
  set_target_properties(untorch::untorch PROPERTIES
    IMPORTED_LOCATION "${_untorch}/libuntorch.so"
    INTERFACE_INCLUDE_DIRECTORIES "${_untorch}/include"
    INTERFACE_COMPILE_FEATURES cxx_std_17)
endif()
foreach(_untorch_file libuntorch.so include/untorch/untorch.h include/untorch/caller_stream.h)
  if(NOT EXISTS "${_untorch}/${_untorch_file}")
    set(untorch_FOUND FALSE)
    set(untorch_NOT_FOUND_MESSAGE "${_untorch}/${_untorch_file} does not exist: install untorch from a wheel")
  endif()
endforeach()
unset(_untorch_file)
unset(_untorch)
