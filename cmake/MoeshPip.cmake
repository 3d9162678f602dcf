# pip builds for the torch of its Python, and in the build tree. One that was configured for another
# torch is not turned over behind the back of whoever works in it.
execute_process(COMMAND ${Python_EXECUTABLE} -c
  "import importlib.util as u; print(*u.find_spec('torch').submodule_search_locations)"
  OUTPUT_VARIABLE pip_torch ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT pip_torch)
  message(FATAL_ERROR "${Python_EXECUTABLE} has no torch: pip install torch, then pip install "
    "--no-build-isolation . (with isolation pip builds in an environment of its own)")
endif()
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
      "--no-build-isolation -C build-dir=build-pip .")
  endif()
else()
  set(MOESH_TORCH_DIR ${pip_torch} CACHE PATH "Folder of the torch package" FORCE)
endif()
