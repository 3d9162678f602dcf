# Configuring with a wrong torch fails, and says what to do. Input: SOURCE (the tree), WORK (a
# folder to use), GENERATOR, COMPILER.

function(expect_refusal torch_dir)
  file(REMOVE_RECURSE ${WORK}/build)
  execute_process(
    COMMAND ${CMAKE_COMMAND} -G ${GENERATOR} -S ${SOURCE} -B ${WORK}/build
    -DCMAKE_CXX_COMPILER=${COMPILER} -DMOESH_TORCH_DIR=${torch_dir}
    RESULT_VARIABLE code OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(code EQUAL 0)
    message(FATAL_ERROR "Configuring with MOESH_TORCH_DIR=${torch_dir} succeeded; it should refuse")
  endif()
  string(REGEX REPLACE "[ \n]+" " " plain "${output}") # CMake wraps its messages
  string(REGEX MATCHALL "CMake Error" errors "${output}")
  list(LENGTH errors num_errors)
  if(NOT num_errors EQUAL 1)
    message(FATAL_ERROR "Configuring with MOESH_TORCH_DIR=${torch_dir} gives ${num_errors} errors; "
      "one sentence is enough:\n${output}")
  endif()
  foreach(text IN LISTS ARGN)
    string(FIND "${plain}" "${text}" at)
    if(at EQUAL -1)
      message(FATAL_ERROR
        "Configuring with MOESH_TORCH_DIR=${torch_dir} does not say '${text}':\n${output}")
    endif()
  endforeach()
endfunction()

expect_refusal(/nonexistent
  "MOESH_TORCH_DIR is '/nonexistent', which is not the folder of a torch package"
  "Pass -DMOESH_TORCH_DIR=$(python3 -c 'import torch; print(torch.__path__[0])')")

# A torch that is too old, with the version where old ones have it, and where new ones do.
foreach(header torch/csrc/api/include/torch/version.h torch/headeronly/version.h)
  set(fake ${WORK}/torch)
  file(REMOVE_RECURSE ${fake})
  file(WRITE ${fake}/include/ATen/core/Tensor.h "")
  file(WRITE ${fake}/lib/libtorch_cpu.so "")
  file(WRITE ${fake}/include/${header}
    "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 10\n")
  expect_refusal(${fake} "torch 2.10 in ${fake} is too old: moesh needs 2.11 or later"
    "run scripts/setup.sh")
endforeach()
