option(UNTORCH_UNITY "Compile several sources at a time, for builds that only tests use: headers are most of a compile" OFF)

# untorch_group_sources(variable folder largest): has the sources in the list `variable` compiled in groups of up to
# `largest`, by files that include them. Sources with options of their own stay as they are. See cmake/unity.py.
function(untorch_group_sources variable folder largest)
  if(NOT UNTORCH_UNITY OR NOT ${variable})
    return()
  endif()
  if(NOT Python_EXECUTABLE)
    find_package(Python REQUIRED COMPONENTS Interpreter)
  endif()
  set(own)
  set(others)
  foreach(source IN LISTS ${variable})
    get_source_file_property(options ${source} COMPILE_OPTIONS)
    get_source_file_property(definitions ${source} COMPILE_DEFINITIONS)
    get_source_file_property(skips ${source} SKIP_PRECOMPILE_HEADERS)
    if(options OR definitions OR skips)
      list(APPEND own ${source})
    else()
      list(APPEND others ${source})
    endif()
  endforeach()
  execute_process(
    COMMAND ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/cmake/unity.py ${CMAKE_CURRENT_BINARY_DIR}/generated/unity/${folder} ${largest}
            ${others}
    OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE groups COMMAND_ERROR_IS_FATAL ANY)
  string(REPLACE "\n" ";" groups "${groups}")
  # The groups change with what the sources define.
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${others} ${PROJECT_SOURCE_DIR}/cmake/unity.py)
  set(${variable} ${groups} ${own} PARENT_SCOPE)
endfunction()
