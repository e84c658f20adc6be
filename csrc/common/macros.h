// Host/device qualifiers that vanish for a plain C++ compiler, so that one source of the epilogue formulas runs
// everywhere.
#pragma once

#if defined(__CUDACC__)
#define CUTFUSE_HOST_DEVICE __host__ __device__ __forceinline__
#define CUTFUSE_UNROLL _Pragma("unroll")
#define CUTFUSE_NO_UNROLL _Pragma("unroll 1")
#else
#define CUTFUSE_HOST_DEVICE inline
#define CUTFUSE_UNROLL
#define CUTFUSE_NO_UNROLL
#endif
