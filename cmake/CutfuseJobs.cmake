# Ninja job pools sized to memory: a translation unit of GEMM kernels takes 5 GB in nvcc 13.0, the others up to about
# 1.5 GB.

cmake_host_system_information(RESULT cutfuse_memory_mb QUERY TOTAL_PHYSICAL_MEMORY)
cmake_host_system_information(RESULT cutfuse_cores QUERY NUMBER_OF_LOGICAL_CORES)
if(EXISTS /sys/fs/cgroup/memory.max)
  file(STRINGS /sys/fs/cgroup/memory.max cutfuse_limit LIMIT_COUNT 1)
  if(cutfuse_limit MATCHES "^[0-9]+$")
    math(EXPR cutfuse_limit_mb "${cutfuse_limit} / 1048576")
    if(cutfuse_limit_mb LESS cutfuse_memory_mb)
      set(cutfuse_memory_mb ${cutfuse_limit_mb})
    endif()
  endif()
endif()

function(cutfuse_add_job_pool name megabytes_each)
  math(EXPR jobs "${cutfuse_memory_mb} / ${megabytes_each}")
  if(jobs GREATER cutfuse_cores)
    set(jobs ${cutfuse_cores})
  elseif(jobs LESS 1)
    set(jobs 1)
  endif()
  set_property(GLOBAL APPEND PROPERTY JOB_POOLS ${name}=${jobs})
endfunction()

cutfuse_add_job_pool(cutfuse_gemm_jobs 6144)
cutfuse_add_job_pool(cutfuse_portable_jobs 2048)
