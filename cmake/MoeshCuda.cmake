# The CUDA compiler, if there is one. Output: MOESH_CUDA_KERNELS (whether the kernels are compiled),
# MOESH_CUDA_FLAGS, and moesh_cuda(target architectures...): how its sources are compiled. What is
# linked is static: a program runs on machines without a GPU.
option(MOESH_CUDA "Compile the kernels for GPUs, where a CUDA compiler is found" ON)
set(MOESH_CUDA_KERNELS OFF)
if(MOESH_CUDA AND NOT MOESH_SANITIZE)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_ARCHITECTURES 90a-real) # only this chip has wgmma and setmaxnreg
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER})
    enable_language(CUDA)
    # a CMake older than the compiler does not know what it can do
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
      list(APPEND CMAKE_CUDA_COMPILE_FEATURES cuda_std_20)
    endif()
    find_library(MOESH_CUDART cudart_static HINTS ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES} REQUIRED)
    set(MOESH_CUDA_KERNELS ON)
  endif()
endif()
# Functions that are constexpr in a plain header are functions of the device, too.
set(MOESH_CUDA_FLAGS -O3 --expt-relaxed-constexpr)

function(moesh_cuda target)
  set_target_properties(${target} PROPERTIES CUDA_STANDARD 20 CUDA_ARCHITECTURES "${ARGN}"
    CUDA_RUNTIME_LIBRARY None POSITION_INDEPENDENT_CODE ON)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:${MOESH_CUDA_FLAGS}
    -Werror=all-warnings>)
endfunction()
