# The kernel library, cutfuse_kernels: knows neither Python nor torch, so one build of it serves every version of both.

file(GLOB host_sources CONFIGURE_DEPENDS csrc/common/*.cpp csrc/epilogue/*.cpp csrc/plan/*.cpp
     csrc/specialize/*.cpp csrc/pointwise/*_plan.cpp csrc/reduce/*_plan.cpp csrc/split/*_plan.cpp)
add_library(cutfuse_kernels STATIC ${host_sources})
target_link_libraries(cutfuse_kernels PUBLIC cutfuse_options)

# What `python -m cutfuse.report` tells of the build.
set(gemm_architecture 90a)
if(CUTFUSE_WITH_CUDA)
  list(JOIN CUTFUSE_PORTABLE_ARCHITECTURES " " portable_architectures)
  set_property(SOURCE csrc/common/build_info.cpp PROPERTY COMPILE_DEFINITIONS
    CUTFUSE_CUDA_COMPILER="${CMAKE_CUDA_COMPILER_VERSION}"
    CUTFUSE_GEMM_ARCHITECTURES="${gemm_architecture}-real"
    CUTFUSE_PORTABLE_ARCHITECTURES="${portable_architectures}")
endif()
if(NOT CUTFUSE_WITH_CUDA)
  return()
endif()
target_link_libraries(cutfuse_kernels PUBLIC cutfuse_cudart)

find_program(CUTFUSE_CCACHE ccache)
set(checked_nvcc "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/cmake/checked_nvcc.py")
set(compiler_cache "")
if(CMAKE_CUDA_COMPILER_LAUNCHER)
  set(compiler_cache ${CMAKE_CUDA_COMPILER_LAUNCHER})
elseif(CUTFUSE_CCACHE)
  set(compiler_cache "${CUTFUSE_CCACHE}")
endif()

# The interpreter dispatches by a switch over ops. nvcc makes a binary search of branches of it unless it is told how
# dense a jump table may be; a table saves 5% of a product with six ops after it (H200).
set(jump_tables "")
if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13.0)
  set(jump_tables --jump-table-density=50)
endif()

# KEEP_PTX: the PTX of each source stays beside its object. A compiler cache knows nothing of it, and has no part in it.
function(cutfuse_add_kernels name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "KEEP_PTX" "POOL" "SOURCES;GENCODE")
  set(launcher ${checked_nvcc} ${compiler_cache})
  if(arg_KEEP_PTX)
    set(launcher ${checked_nvcc} --keep-ptx)
  endif()
  add_library(${name} OBJECT ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE cutfuse_options cutfuse_cudart cutfuse_cutlass)
  # "#pragma unroll" is for the device compiler; the host compiler does not know it.
  target_compile_options(${name} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:${arg_GENCODE} ${jump_tables} --expt-relaxed-constexpr
                         -Xptxas=-v -Xcompiler=-Wall,-Wno-unknown-pragmas>)
  set_target_properties(${name} PROPERTIES CUDA_COMPILER_LAUNCHER "${launcher}" JOB_POOL_COMPILE ${arg_POOL})
  target_link_libraries(cutfuse_kernels PRIVATE ${name})
endfunction()

# Pointwise, reduction and splitting kernels, for every architecture in the list and as PTX for newer ones.
set(portable_gencode "")
foreach(architecture IN LISTS CUTFUSE_PORTABLE_ARCHITECTURES)
  if(architecture MATCHES "^([0-9]+a?)-real$")
    list(APPEND portable_gencode "-gencode=arch=compute_${CMAKE_MATCH_1},code=sm_${CMAKE_MATCH_1}")
  elseif(architecture MATCHES "^([0-9]+)-virtual$")
    list(APPEND portable_gencode "-gencode=arch=compute_${CMAKE_MATCH_1},code=compute_${CMAKE_MATCH_1}")
  else()
    message(FATAL_ERROR "CUTFUSE_PORTABLE_ARCHITECTURES has '${architecture}'; write 90-real or 90-virtual.")
  endif()
endforeach()
if(portable_gencode MATCHES "code=compute_[78]" AND portable_gencode MATCHES "code=sm_[91]"
   AND NOT portable_gencode MATCHES "code=compute_[91]")
  message(FATAL_ERROR "CUTFUSE_PORTABLE_ARCHITECTURES is '${CUTFUSE_PORTABLE_ARCHITECTURES}': GPUs newer than those of "
                      "its binaries would run PTX of before sm_90, which cannot wait for the previous kernel although "
                      "it is launched before that ends. Add 90-virtual.")
endif()
foreach(family IN ITEMS pointwise reduce split)
  file(GLOB family_sources CONFIGURE_DEPENDS csrc/${family}/*.cu csrc/${family}/*.cpp)
  list(REMOVE_ITEM family_sources ${host_sources})
  cutfuse_add_kernels(cutfuse_${family} POOL cutfuse_portable_jobs SOURCES ${family_sources}
                      GENCODE ${portable_gencode})
endforeach()

# GEMM kernels: generated translation units, each with as many rows of the table. A unit's first kernel on tensor cores
# costs nvcc 13.0 45 s of processor time and each further one 10 s, because they share CUTLASS's templates; ptxas makes
# the same code. Those on CUDA cores, which take 2 s each, have units of their own.
if(NOT CUTFUSE_SM90_KERNELS_PER_FILE MATCHES "^[1-9][0-9]*$")
  message(FATAL_ERROR "CUTFUSE_SM90_KERNELS_PER_FILE is '${CUTFUSE_SM90_KERNELS_PER_FILE}'; write a number from 1, as 4.")
endif()
set(sm90_kernels_per_file ${CUTFUSE_SM90_KERNELS_PER_FILE})
set(fma_kernels_per_file 5)
set(gemm_table "${CMAKE_CURRENT_SOURCE_DIR}/csrc/plan/gemm_configs.def")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${gemm_table}")
file(STRINGS "${gemm_table}" gemm_rows REGEX "^CUTFUSE_GEMM_CONFIG\\(")
set(gemm_names "")
set(sm90_rows "")
set(fma_rows "")
foreach(row IN LISTS gemm_rows)
  if(NOT row MATCHES "^CUTFUSE_GEMM_CONFIG\\((([A-Za-z0-9_]+),.*)\\)$")
    message(FATAL_ERROR "${gemm_table}: cannot read the row '${row}'")
  endif()
  if(CMAKE_MATCH_2 IN_LIST gemm_names)
    message(FATAL_ERROR "${gemm_table}: two rows are named ${CMAKE_MATCH_2}")
  endif()
  list(APPEND gemm_names "${CMAKE_MATCH_2}")
  set(fields "${CMAKE_MATCH_1}")
  if(fields MATCHES ", (Fma|Dot), ")
    list(APPEND fma_rows "${fields}")
  else()
    list(APPEND sm90_rows "${fields}")
  endif()
endforeach()
set(gemm_instances "")
foreach(family IN ITEMS sm90 fma)
  string(TOUPPER ${family} macro)
  list(LENGTH ${family}_rows rest)
  set(file_number 0)
  while(rest GREATER 0)
    set(content "#include \"gemm/${family}_gemm_instance.h\"\n\n")
    foreach(place RANGE 1 ${${family}_kernels_per_file})
      if(rest GREATER 0)
        list(POP_FRONT ${family}_rows fields)
        string(APPEND content "CUTFUSE_INSTANTIATE_${macro}(${fields})\n")
        math(EXPR rest "${rest} - 1")
      endif()
    endforeach()
    set(instances "${CMAKE_CURRENT_BINARY_DIR}/gemm/${family}_kernels_${file_number}.cu")
    file(CONFIGURE OUTPUT "${instances}" CONTENT "${content}" @ONLY)
    list(APPEND gemm_instances "${instances}")
    math(EXPR file_number "${file_number} + 1")
  endwhile()
endforeach()
list(LENGTH gemm_names gemm_count)
list(LENGTH gemm_instances gemm_file_count)
message(STATUS "cutfuse: ${gemm_count} GEMM kernels for sm_90a in ${gemm_file_count} files, from csrc/plan/gemm_configs.def")
file(GLOB gemm_sources CONFIGURE_DEPENDS csrc/gemm/*.cpp csrc/gemm/*.cu)
cutfuse_add_kernels(cutfuse_gemm KEEP_PTX POOL cutfuse_gemm_jobs SOURCES ${gemm_sources} ${gemm_instances}
                    GENCODE -gencode=arch=compute_${gemm_architecture},code=sm_${gemm_architecture})

include(CutfuseSpecialize)
