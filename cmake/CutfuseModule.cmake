# The Python module, cutfuse._C: a thin pybind11 layer over the kernel library.

find_package(Python 3.10 QUIET COMPONENTS Interpreter Development.Module)
if(NOT Python_Development.Module_FOUND)
  message(FATAL_ERROR "The C headers of ${Python_EXECUTABLE} are missing; on Debian and Ubuntu install python3-dev.")
endif()
set(PYBIND11_FINDPYTHON ON)
if(NOT pybind11_DIR)
  execute_process(COMMAND "${Python_EXECUTABLE}" -m pybind11 --cmakedir
                  OUTPUT_VARIABLE pybind11_DIR OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
endif()
find_package(pybind11 3.0 REQUIRED CONFIG)

file(GLOB module_sources CONFIGURE_DEPENDS csrc/bindings*.cpp csrc/call/*.cpp csrc/launch/*.cpp)
if(CUTFUSE_WITH_CUDA)
  list(FILTER module_sources EXCLUDE REGEX "launch/no_kernels\\.cpp$")
else()
  list(FILTER module_sources EXCLUDE REGEX "(launch/cuda_kernels|bindings_kernels)\\.cpp$")
endif()
pybind11_add_module(_C MODULE NO_EXTRAS ${module_sources})
target_link_libraries(_C PRIVATE cutfuse_kernels)
if(CUTFUSE_WITH_CUDA)
  target_compile_definitions(_C PRIVATE CUTFUSE_WITH_CUDA=1)
endif()
if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
  # The runtime inside stays private: torch brings a cudart of its own into the same process.
  target_link_options(_C PRIVATE LINKER:--exclude-libs,ALL)
endif()
install(TARGETS _C LIBRARY DESTINATION cutfuse)
