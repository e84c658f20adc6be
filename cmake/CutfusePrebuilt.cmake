# A kernel library built elsewhere (CUTFUSE_PREBUILT_KERNELS): here only the module is compiled, with no nvcc. Needed
# beside it are libcudart_static.a and, at compile time, the CUDA runtime's headers.

if(NOT EXISTS "${CUTFUSE_PREBUILT_KERNELS}")
  message(FATAL_ERROR "CUTFUSE_PREBUILT_KERNELS names '${CUTFUSE_PREBUILT_KERNELS}', which does not exist.")
endif()
set(CUTFUSE_WITH_CUDA ON)
cmake_path(GET CUTFUSE_PREBUILT_KERNELS PARENT_PATH prebuilt_folder)
set(toolkits "$ENV{CUDA_HOME}" "$ENV{CUDA_PATH}" /usr/local/cuda)
cutfuse_find(nvcc nvcc)
if(nvcc)
  cmake_path(GET nvcc PARENT_PATH nvcc_bin)
  list(APPEND toolkits "${nvcc_bin}/..")
endif()
cutfuse_add_cudart(HINTS "${prebuilt_folder}" ${toolkits})
find_path(CUTFUSE_CUDART_INCLUDE cuda_runtime.h REQUIRED HINTS "${prebuilt_folder}" ${toolkits}
          PATH_SUFFIXES include targets/x86_64-linux/include targets/sbsa-linux/include)
target_include_directories(cutfuse_cudart SYSTEM INTERFACE "${CUTFUSE_CUDART_INCLUDE}")
add_library(cutfuse_kernels STATIC IMPORTED)
set_target_properties(cutfuse_kernels PROPERTIES IMPORTED_LOCATION "${CUTFUSE_PREBUILT_KERNELS}")
target_link_libraries(cutfuse_kernels INTERFACE cutfuse_options cutfuse_cudart)
