# Our CUDA kernels, compiled by nvcc where there is one. CMake's own CUDA language is not used: it wants a toolkit whose
# runtime links, and untorch links none (native/cuda/kernel_registry.cpp takes its place).
set(UNTORCH_CUDA "AUTO" CACHE STRING "CUDA kernels: ON, OFF, or AUTO (when nvcc is found)")
set_property(CACHE UNTORCH_CUDA PROPERTY STRINGS AUTO ON OFF)
# A cubin runs on every GPU of its major version from its minor version on; the PTX is for whatever comes after.
set(UNTORCH_CUDA_ARCHITECTURES "80;90" CACHE STRING "Compute capabilities to compile the CUDA kernels for")

# A third of the compile's time is left. Kernels for Hopper's own instructions are optimised all the same: ptxas warns of
# others.
option(UNTORCH_CUDA_OPTIMIZE "Optimise CUDA kernels; OFF for builds that no GPU runs" ON)
option(UNTORCH_RACECHECK "Have kernels say more, for compute-sanitizer's racecheck; slower" OFF)

if(UNTORCH_CUDA STREQUAL "OFF")
  unset(UNTORCH_NVCC CACHE)  # of an earlier configuration of this folder
  message(STATUS "CUDA kernels: none, packages for GPUs will be refused: UNTORCH_CUDA is OFF")
else()
  find_program(UNTORCH_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda/bin PATH_SUFFIXES bin)
  if(UNTORCH_NVCC)
    message(STATUS "CUDA kernels: ${UNTORCH_NVCC}, for ${UNTORCH_CUDA_ARCHITECTURES}")
    if(NOT UNTORCH_CUDA_OPTIMIZE)
      message(STATUS "CUDA kernels: slow ones, as UNTORCH_CUDA_OPTIMIZE is OFF")
    endif()
    # A sixth of the size; CUDA 12.8 and newer know the mode.
    execute_process(COMMAND ${UNTORCH_NVCC} --help OUTPUT_VARIABLE nvcc_help)
    if(nvcc_help MATCHES "--compress-mode")
      set(UNTORCH_NVCC_COMPRESS --compress-mode=size)
    else()
      set(UNTORCH_NVCC_COMPRESS -Xfatbin=-compress-all)
    endif()
  elseif(UNTORCH_CUDA STREQUAL "ON")
    message(FATAL_ERROR "UNTORCH_CUDA is ON, but nvcc was not found: set UNTORCH_NVCC")
  else()
    message(STATUS "CUDA kernels: none, packages for GPUs will be refused: nvcc was not found; set CUDA_HOME or UNTORCH_NVCC")
  endif()
endif()

if(POLICY CMP0116)
  cmake_policy(SET CMP0116 NEW)  # dependency files of custom commands are read as they are
endif()

# untorch_cuda_instance(name template variable=value...): makes kernels/cuda/NAME.cu of a template (*.cu.in) and appends
# it to cuda_sources. See native/kernels/cuda/instances.cmake.
function(untorch_cuda_instance name template)
  foreach(assignment IN LISTS ARGN)
    string(FIND "${assignment}" "=" at)
    string(SUBSTRING "${assignment}" 0 ${at} variable)
    math(EXPR at "${at} + 1")
    string(SUBSTRING "${assignment}" ${at} -1 ${variable})
  endforeach()
  set(source ${CMAKE_CURRENT_BINARY_DIR}/generated/kernels/cuda/${name}.cu)
  configure_file(${CMAKE_CURRENT_SOURCE_DIR}/kernels/cuda/${template} ${source} @ONLY)
  set(cuda_sources ${cuda_sources} ${source} PARENT_SCOPE)
endfunction()

# Compiles .cu files and adds the objects to a target. Grouped with UNTORCH_UNITY; fewer that take half a minute each.
function(untorch_add_cuda_sources target)
  set(sources ${ARGN})
  set(hopper_sources ${ARGN})
  list(FILTER sources EXCLUDE REGEX "\\.sm90a\\.cu$")
  list(FILTER hopper_sources INCLUDE REGEX "\\.sm90a\\.cu$")
  untorch_group_sources(sources cu 14)
  untorch_group_sources(hopper_sources sm90a 2)
  set(codes)
  foreach(arch IN LISTS UNTORCH_CUDA_ARCHITECTURES)
    list(APPEND codes -gencode=arch=compute_${arch},code=sm_${arch})
    set(newest ${arch})
  endforeach()
  list(APPEND codes -gencode=arch=compute_${newest},code=compute_${newest})
  set(warnings -Xcompiler=-Wall,-Wextra)
  if(UNTORCH_RACECHECK)
    list(APPEND codes -DUNTORCH_RACECHECK)
  endif()
  if(UNTORCH_WERROR)
    list(APPEND warnings -Werror=all-warnings -Xcompiler=-Werror)
  endif()
  foreach(source IN LISTS hopper_sources sources)
    file(RELATIVE_PATH name ${CMAKE_CURRENT_SOURCE_DIR} ${source})
    string(REGEX REPLACE "^.*generated/" "" name ${name})
    set(object ${CMAKE_CURRENT_BINARY_DIR}/cuda/${name}.o)
    get_filename_component(folder ${object} DIRECTORY)
    file(MAKE_DIRECTORY ${folder})
    # A kernel for Hopper's own instructions is named *.sm90a.cu and compiled for nothing else.
    if(name MATCHES "\\.sm90a\\.cu$")
      set(file_codes ${codes})
      list(FILTER file_codes EXCLUDE REGEX "^-gencode")
      list(APPEND file_codes -gencode=arch=compute_90a,code=sm_90a)
    else()
      set(file_codes ${codes})
      if(NOT UNTORCH_CUDA_OPTIMIZE)
        list(APPEND file_codes -Xcicc=-O1 -Xptxas=-O0)
      endif()
    endif()
    add_custom_command(
      OUTPUT ${object}
      COMMAND ${CMAKE_CXX_COMPILER_LAUNCHER} ${UNTORCH_NVCC} -c ${source} -o ${object} -std=c++20 -O3 ${file_codes}
              -I${CMAKE_CURRENT_SOURCE_DIR} -Xcompiler=-fPIC,-fvisibility=hidden
              -Xcompiler=-ffile-prefix-map=${PROJECT_SOURCE_DIR}/= -ccbin ${CMAKE_CXX_COMPILER}
              --expt-relaxed-constexpr --extended-lambda ${UNTORCH_NVCC_COMPRESS} ${warnings} -MD -MF ${object}.d
      DEPENDS ${source}
      DEPFILE ${object}.d
      COMMENT "Building CUDA object ${name}"
      VERBATIM)
    target_sources(${target} PRIVATE ${object})
    set_source_files_properties(${object} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
  endforeach()
endfunction()
