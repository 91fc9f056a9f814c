# Finds ONNX Runtime's C API headers (its wheels do not carry them) and makes the target onnxruntime_headers.
# The API is stable: a library built with older headers runs in any newer ONNX Runtime.

set(ONNXRUNTIME_INCLUDE_DIR "$ENV{ONNXRUNTIME_INCLUDE_DIR}" CACHE PATH "Folder that holds onnxruntime_cxx_api.h")

set(_fetched "${CMAKE_BINARY_DIR}/onnxruntime-headers")
find_path(ONNXFUSE_ORT_INCLUDE onnxruntime_cxx_api.h
  HINTS "${ONNXRUNTIME_INCLUDE_DIR}" PATHS "${_fetched}"
  PATH_SUFFIXES onnxruntime include/onnxruntime onnxruntime/core/session core/session)

if(NOT ONNXFUSE_ORT_INCLUDE)
  find_package(Python3 COMPONENTS Interpreter REQUIRED)
  message(STATUS "ONNX Runtime headers: fetching Debian's libonnxruntime-dev")
  execute_process(
    COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/fetch_ort_headers.py" "${_fetched}"
    RESULT_VARIABLE _result ERROR_VARIABLE _error)
  find_path(ONNXFUSE_ORT_INCLUDE onnxruntime_cxx_api.h PATHS "${_fetched}" NO_DEFAULT_PATH)
  if(NOT ONNXFUSE_ORT_INCLUDE)
    message(FATAL_ERROR
      "ONNX Runtime's C API headers were not found. There are three ways to provide them:\n"
      "  1. set ONNXRUNTIME_INCLUDE_DIR (environment or --config-settings=cmake.define.ONNXRUNTIME_INCLUDE_DIR=...) to a folder\n"
      "     that holds onnxruntime_cxx_api.h, for example the include folder of an ONNX Runtime release archive;\n"
      "  2. install the system's package (libonnxruntime-dev on Debian and Ubuntu);\n"
      "  3. build on Debian with apt sources that can be reached, from where they are fetched without root.\n"
      "The third way was tried: ${_error}")
  endif()
endif()
message(STATUS "ONNX Runtime headers: ${ONNXFUSE_ORT_INCLUDE}")

add_library(onnxruntime_headers INTERFACE)
target_include_directories(onnxruntime_headers SYSTEM INTERFACE "${ONNXFUSE_ORT_INCLUDE}")
