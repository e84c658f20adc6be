# Decides whether CUDA kernels are built (CUTFUSE_WITH_CUDA), enables the language and finds cudart and CUTLASS.

# toolchain.py holds the search order for the build hook and for CMake alike.
function(cutfuse_find what result)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/build_backend/toolchain.py" ${what} ${ARGN}
    OUTPUT_VARIABLE path OUTPUT_STRIP_TRAILING_WHITESPACE
    ERROR_VARIABLE error ERROR_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${error}.")
  endif()
  set(${result} "${path}" PARENT_SCOPE)
endfunction()

# cudart is linked statically and by path: no CUDA library is then needed to import the module, on any machine.
function(cutfuse_add_cudart)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "" "HINTS")
  find_library(CUTFUSE_CUDART_STATIC NAMES libcudart_static.a HINTS ${arg_HINTS}
               PATH_SUFFIXES lib64 lib targets/x86_64-linux/lib targets/sbsa-linux/lib)
  if(NOT CUTFUSE_CUDART_STATIC)
    message(FATAL_ERROR "libcudart_static.a was not found in ${arg_HINTS}; set CUTFUSE_CUDART_STATIC to its path.")
  endif()
  find_package(Threads REQUIRED)
  add_library(cutfuse_cudart INTERFACE)
  target_link_libraries(cutfuse_cudart INTERFACE "${CUTFUSE_CUDART_STATIC}" Threads::Threads ${CMAKE_DL_LIBS} rt)
endfunction()

function(cutfuse_find_cutlass)
  if(NOT CUTLASS_DIR)
    cutfuse_find(cutlass cutlass_dir)
  else()
    set(cutlass_dir "${CUTLASS_DIR}")
  endif()
  if(NOT EXISTS "${cutlass_dir}/include/cutlass/cutlass.h")
    message(FATAL_ERROR "No CUTLASS headers: '${cutlass_dir}' holds no include/cutlass/cutlass.h. Install "
                        "nvidia-cutlass==4.2.0.0 beside ${Python_EXECUTABLE}, or set CUTLASS_DIR to a CUTLASS 4.2 tree.")
  endif()
  add_library(cutfuse_cutlass INTERFACE)
  target_include_directories(cutfuse_cutlass SYSTEM INTERFACE "${cutlass_dir}/include"
                                                              "${cutlass_dir}/tools/util/include")
  message(STATUS "cutfuse: CUTLASS headers in ${cutlass_dir}")
endfunction()

set(CUTFUSE_WITH_CUDA OFF)
if(CUTFUSE_PREBUILT_KERNELS)
  return()
endif()
if(NOT CUTFUSE_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "CUTFUSE_CUDA is '${CUTFUSE_CUDA}'; it must be AUTO, ON or OFF.")
endif()
if(CUTFUSE_CUDA STREQUAL "OFF")
  set(CUTFUSE_CPU_ONLY_REASON "CUTFUSE_CUDA is OFF")
  return()
endif()

cutfuse_find(nvcc nvcc ${CMAKE_CUDA_COMPILER})
if(NOT nvcc AND CUTFUSE_NVCC_WHEELS)
  cutfuse_find(wheel-nvcc nvcc)
endif()
if(NOT nvcc)
  set(CUTFUSE_CPU_ONLY_REASON "no nvcc in CUDACXX, on PATH, in CUDA_HOME or in /usr/local/cuda")
  if(CUTFUSE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "CUTFUSE_CUDA is ON but there is ${CUTFUSE_CPU_ONLY_REASON}.")
  endif()
  return()
endif()

set(CUTFUSE_WITH_CUDA ON)
set(CMAKE_CUDA_COMPILER "${nvcc}")
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_ARCHITECTURES OFF)
set(CMAKE_CUDA_RUNTIME_LIBRARY None)
# CMake's compiler check links a program; the wheels' nvcc looks for its libraries in lib64, but the wheels ship lib.
cmake_path(GET nvcc PARENT_PATH nvcc_bin)
set(ENV{LIBRARY_PATH} "${nvcc_bin}/../lib:$ENV{LIBRARY_PATH}")
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
  message(FATAL_ERROR "nvcc ${CMAKE_CUDA_COMPILER_VERSION} (${nvcc}) is too old; use 12.8 or later (13.0 is what is "
                      "tested), or CUTFUSE_CUDA=OFF.")
endif()
message(STATUS "cutfuse: nvcc ${CMAKE_CUDA_COMPILER_VERSION} (${nvcc})")
cutfuse_add_cudart(HINTS ${CMAKE_CUDA_COMPILER_LIBRARY_ROOT} ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES})
target_include_directories(cutfuse_cudart SYSTEM INTERFACE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
cutfuse_find_cutlass()
