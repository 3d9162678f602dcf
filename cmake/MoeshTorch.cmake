# Imports LibTorch from an installed torch package without its own CMake package, which fails where
# pip gave a CUDA build and the machine has no CUDA toolkit. Input: MOESH_TORCH_DIR, the package's
# folder (…/site-packages/torch). Output: target moesh::torch, MOESH_TORCH_VERSION,
# MOESH_TORCH_CUDA.

if(TARGET moesh::torch)
  return()
endif()

if(NOT EXISTS "${MOESH_TORCH_DIR}/include/ATen/core/Tensor.h" OR NOT EXISTS
  "${MOESH_TORCH_DIR}/lib/libtorch_cpu.so")
  message(FATAL_ERROR
    "MOESH_TORCH_DIR is '${MOESH_TORCH_DIR}', which is not the folder of a torch package (it has "
    "no include/ATen or lib/libtorch_cpu.so). Pass "
    "-DMOESH_TORCH_DIR=$(python3 -c 'import torch; print(torch.__path__[0])').")
endif()

set(_header "${MOESH_TORCH_DIR}/include/torch/headeronly/version.h")
if(NOT EXISTS "${_header}") # older ones have it elsewhere
  set(_header "${MOESH_TORCH_DIR}/include/torch/csrc/api/include/torch/version.h")
endif()
file(STRINGS "${_header}" _lines REGEX "define TORCH_VERSION_M")
string(REGEX MATCH "TORCH_VERSION_MAJOR ([0-9]+)" _ "${_lines}")
set(_major "${CMAKE_MATCH_1}")
string(REGEX MATCH "TORCH_VERSION_MINOR ([0-9]+)" _ "${_lines}")
set(MOESH_TORCH_VERSION "${_major}.${CMAKE_MATCH_1}")
if(MOESH_TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR
    "torch ${MOESH_TORCH_VERSION} in ${MOESH_TORCH_DIR} is too old: moesh needs 2.11 or later. Set "
    "MOESH_TORCH_DIR to a newer one, or unset it and run scripts/setup.sh.")
endif()

add_library(moesh::torch INTERFACE IMPORTED)
set_target_properties(moesh::torch PROPERTIES
  INTERFACE_INCLUDE_DIRECTORIES
  "${MOESH_TORCH_DIR}/include;${MOESH_TORCH_DIR}/include/torch/csrc/api/include")
set(_libraries "${MOESH_TORCH_DIR}/lib/libtorch.so" "${MOESH_TORCH_DIR}/lib/libtorch_cpu.so"
  "${MOESH_TORCH_DIR}/lib/libc10.so")
set(MOESH_TORCH_CUDA OFF)
if(EXISTS "${MOESH_TORCH_DIR}/lib/libtorch_cuda.so")
  set(MOESH_TORCH_CUDA ON)
  # Nothing refers to it by name, but it registers the CUDA kernels: it must be loaded.
  set(_lib "${MOESH_TORCH_DIR}/lib")
  list(APPEND _libraries
    "-Wl,--no-as-needed,${_lib}/libtorch_cuda.so,${_lib}/libc10_cuda.so,--as-needed")
endif()
set_property(TARGET moesh::torch PROPERTY INTERFACE_LINK_LIBRARIES "${_libraries}")
set_property(TARGET moesh::torch PROPERTY INTERFACE_LINK_OPTIONS
  "-Wl,--allow-shlib-undefined,-rpath-link,${MOESH_TORCH_DIR}/lib") # CMake sets the run path

# A compiler that links libstdc++ as an archive would give each program a second one beside the
# shared one of LibTorch. They share symbols, and the first warning that LibTorch prints ends the
# program: link the shared one before it.
set(_program ${CMAKE_BINARY_DIR}/CMakeFiles/links_libstdcxx)
file(CONFIGURE OUTPUT ${_program}.cpp CONTENT
  "#include <iostream>\nint main() { std::cerr << 1; }\n")
try_compile(_links ${CMAKE_BINARY_DIR}/CMakeFiles SOURCES ${_program}.cpp COPY_FILE ${_program})
set(_shared)
if(_links)
  file(STRINGS ${_program} _shared REGEX "libstdc\\+\\+\\.so" LIMIT_COUNT 1)
endif()
if(_links AND NOT _shared)
  find_library(MOESH_LIBSTDCXX libstdc++.so.6)
  if(NOT MOESH_LIBSTDCXX)
    message(FATAL_ERROR "${CMAKE_CXX_COMPILER} links libstdc++ statically, which does not go "
      "together with LibTorch: pass -DMOESH_LIBSTDCXX=<path of libstdc++.so.6>")
  endif()
  message(STATUS "libstdc++: ${MOESH_LIBSTDCXX} instead of the compiler's archive")
  add_link_options("SHELL:-Wl,--push-state,--no-as-needed ${MOESH_LIBSTDCXX} -Wl,--pop-state")
endif()
