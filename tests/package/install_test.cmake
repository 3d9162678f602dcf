# Installs moesh into an empty folder: its program does not need the source tree. Then configures,
# builds and runs a project that finds it there, with every example. Input: BUILD (a finished build),
# SOURCE (its tree), WORK (a folder to use), GENERATOR, COMPILER, LAUNCHER, READELF.

file(REMOVE_RECURSE ${WORK}/prefix ${WORK}/build)
execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix OUTPUT_QUIET
  COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${READELF} -d ${WORK}/prefix/bin/moesh OUTPUT_VARIABLE dynamic
  COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "path: \\[[^\n]*" paths "${dynamic}")
string(FIND "${paths}" "${SOURCE}" at)
if(NOT at EQUAL -1)
  message(FATAL_ERROR "The installed program looks for libraries in the source tree: ${paths}")
endif()
execute_process(COMMAND ${CMAKE_COMMAND} -E env --unset=LD_LIBRARY_PATH
  ${WORK}/prefix/bin/moesh --version COMMAND_ERROR_IS_FATAL ANY)
file(REMOVE_RECURSE ${WORK}/project)
file(COPY ${CMAKE_CURRENT_LIST_DIR}/consumer/ ${SOURCE}/examples DESTINATION ${WORK}/project)
execute_process(
  COMMAND ${CMAKE_COMMAND} -G ${GENERATOR} -S ${WORK}/project -B ${WORK}/build
  -DEXAMPLES=${WORK}/project/examples -DCMAKE_PREFIX_PATH=${WORK}/prefix
    -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER}
  COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${CMAKE_COMMAND} --build ${WORK}/build COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${WORK}/build/consumer COMMAND_ERROR_IS_FATAL ANY)
