# What specialized kernels are made of, as PTX whose text becomes part of the kernel library: the op snippets of
# op_snippets.cu, the GEMM kernels, which nvcc leaves beside their objects, and kernels that are compiled for nothing else.

add_library(cutfuse_op_snippets OBJECT csrc/specialize/op_snippets.cu)
target_link_libraries(cutfuse_op_snippets PRIVATE cutfuse_options cutfuse_cudart)
# -rdc=true keeps functions that nothing calls, -fmad=false their roundings apart (see the file's head).
target_compile_options(cutfuse_op_snippets PRIVATE -arch=compute_${gemm_architecture} -rdc=true -fmad=false
                       --expt-relaxed-constexpr)
set_target_properties(cutfuse_op_snippets PROPERTIES CUDA_PTX_COMPILATION ON)

set(embed "${CMAKE_CURRENT_SOURCE_DIR}/cmake/embed_op_snippets.py")
set(op_snippets_text "${CMAKE_CURRENT_BINARY_DIR}/specialize/op_snippets_text.cpp")
add_custom_command(OUTPUT "${op_snippets_text}"
                   COMMAND "${Python_EXECUTABLE}" "${embed}" "$<TARGET_OBJECTS:cutfuse_op_snippets>"
                           "${op_snippets_text}"
                   DEPENDS cutfuse_op_snippets "$<TARGET_OBJECTS:cutfuse_op_snippets>" "${embed}"
                   COMMENT "Embedding the PTX of op_snippets.cu" VERBATIM)

# For every GPU that the portable kernels run on: what it is compiled for at last is the driver's to know.
file(GLOB kernel_template_sources CONFIGURE_DEPENDS csrc/specialize/*_templates.cu)
add_library(cutfuse_kernel_templates OBJECT ${kernel_template_sources})
target_link_libraries(cutfuse_kernel_templates PRIVATE cutfuse_options cutfuse_cudart)
target_compile_options(cutfuse_kernel_templates PRIVATE -arch=compute_80 -fmad=false --expt-relaxed-constexpr)
set_target_properties(cutfuse_kernel_templates PROPERTIES CUDA_PTX_COMPILATION ON)

set(embed "${CMAKE_CURRENT_SOURCE_DIR}/cmake/embed_kernel_templates.py")
set(kernel_templates "${CMAKE_CURRENT_BINARY_DIR}/specialize/kernel_templates.cpp")
add_custom_command(OUTPUT "${kernel_templates}"
                   COMMAND "${Python_EXECUTABLE}" "${embed}" "${kernel_templates}" "$<TARGET_OBJECTS:cutfuse_gemm>"
                           "$<TARGET_OBJECTS:cutfuse_kernel_templates>"
                   DEPENDS cutfuse_gemm "$<TARGET_OBJECTS:cutfuse_gemm>" cutfuse_kernel_templates
                           "$<TARGET_OBJECTS:cutfuse_kernel_templates>" "${embed}"
                           "${CMAKE_CURRENT_SOURCE_DIR}/cmake/embed_op_snippets.py"
                   COMMENT "Embedding the PTX of the kernels" COMMAND_EXPAND_LISTS VERBATIM)

add_library(cutfuse_specialize_text OBJECT "${op_snippets_text}" "${kernel_templates}")
target_link_libraries(cutfuse_specialize_text PRIVATE cutfuse_options)
target_link_libraries(cutfuse_kernels PRIVATE cutfuse_specialize_text)
