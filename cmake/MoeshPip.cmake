# pip builds for the torch of its Python, and in the build tree. One that was configured for another
# torch is not turned over behind the back of whoever works in it.
execute_process(
  COMMAND ${Python_EXECUTABLE} -c "import moesh_build; print(moesh_build.torch_folder())"
  WORKING_DIRECTORY ${CMAKE_CURRENT_LIST_DIR}/../python/backend
  OUTPUT_VARIABLE pip_torch OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
file(REAL_PATH ${pip_torch} pip_torch)
set(configured_torch ${MOESH_TORCH_DIR})
if(NOT configured_torch)
  file(GLOB configured_torch ${CMAKE_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch)
endif()
if(EXISTS ${CMAKE_BINARY_DIR}/build.ninja AND configured_torch)
  file(REAL_PATH ${configured_torch} configured_torch)
  if(NOT configured_torch STREQUAL pip_torch)
    message(FATAL_ERROR "${CMAKE_BINARY_DIR} is built with the torch in ${configured_torch}, and "
      "this Python has one in ${pip_torch}: give it a build folder of its own, as in pip install "
      "-C build-dir=build-pip .")
  endif()
else()
  set(MOESH_TORCH_DIR ${pip_torch} CACHE PATH "Folder of the torch package" FORCE)
endif()
