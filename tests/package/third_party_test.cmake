# A machine that has no package of a library of headers: configuring names it and what to do, and
# finds it under MOESH_THIRD_PARTY. Input: SOURCE (the tree), WORK (a folder to use), GENERATOR,
# COMPILER, TORCH_DIR.

# As if this machine had no packages: /usr/include is not searched.
set(configure ${CMAKE_COMMAND} -G ${GENERATOR} -S ${SOURCE} -B ${WORK}/build
  -DCMAKE_CXX_COMPILER=${COMPILER} -DMOESH_TORCH_DIR=${TORCH_DIR} -DMOESH_TESTS=none
  -DMOESH_BENCH=OFF -DMOESH_EXAMPLES=OFF -DMOESH_USE_MPI=OFF -DMOESH_THIRD_PARTY=${WORK}/prefix
  "-DCMAKE_IGNORE_PATH=/usr/include\;/usr/local/include")

file(REMOVE_RECURSE ${WORK})
foreach(header nlohmann/json.hpp toml++/toml.h xxhash.h CLI/CLI.hpp)
  execute_process(COMMAND ${configure} RESULT_VARIABLE code OUTPUT_VARIABLE output
    ERROR_VARIABLE output)
  string(REGEX REPLACE "[ \n]+" " " plain "${output}") # CMake wraps its messages
  string(FIND "${plain}" "<${header}> was not found: install" at)
  if(code EQUAL 0 OR at EQUAL -1 OR NOT plain MATCHES "set MOESH_THIRD_PARTY to a folder with")
    message(FATAL_ERROR "Without ${header} configuring gives ${code}, and says:\n${output}")
  endif()
  file(WRITE ${WORK}/prefix/include/${header} "")
endforeach()
execute_process(COMMAND ${configure} OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
