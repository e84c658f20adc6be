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
find_package(pybind11 2.13 REQUIRED CONFIG)

pybind11_add_module(_C MODULE NO_EXTRAS csrc/bindings.cpp csrc/bindings_plan.cpp)
target_link_libraries(_C PRIVATE cutfuse_kernels)
if(CUTFUSE_WITH_CUDA)
  file(GLOB cuda_bindings CONFIGURE_DEPENDS csrc/bindings_*.cpp)
  list(FILTER cuda_bindings EXCLUDE REGEX "bindings_plan\\.cpp$")
  target_sources(_C PRIVATE ${cuda_bindings})
  target_compile_definitions(_C PRIVATE CUTFUSE_WITH_CUDA=1)
endif()
if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
  # The runtime inside stays private: torch brings a cudart of its own into the same process.
  target_link_options(_C PRIVATE LINKER:--exclude-libs,ALL)
endif()
install(TARGETS _C LIBRARY DESTINATION cutfuse)
