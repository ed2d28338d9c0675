# Finds compiler and headers among the build requirements that PyPI delivered; include before project().
# Sets ETAP_CUTLASS_INCLUDE and ETAP_TVM_FFI_INCLUDE, and, unless CUDACXX names a compiler, the CUDA compiler itself.

if(NOT Python_EXECUTABLE)
  find_program(Python_EXECUTABLE NAMES python3 python REQUIRED)
endif()
execute_process(
  COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/find_wheels.py"
  OUTPUT_VARIABLE etap_found COMMAND_ERROR_IS_FATAL ANY)
foreach(item IN LISTS etap_found)
  string(REGEX MATCH "^([A-Z_]+)=(.*)$" matched "${item}")
  if(NOT ${CMAKE_MATCH_1}) # a path given with -D wins
    set(${CMAKE_MATCH_1} "${CMAKE_MATCH_2}")
  endif()
endforeach()

foreach(needed IN ITEMS ETAP_CUTLASS_INCLUDE ETAP_TVM_FFI_INCLUDE)
  if(NOT ${needed})
    message(FATAL_ERROR "${needed}: not found for ${Python_EXECUTABLE}; "
      "install the build requirements of pyproject.toml, or pass -D${needed}=PATH")
  endif()
endforeach()

if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  if(NOT ETAP_CUDA_ROOT)
    message(FATAL_ERROR "nvcc: not found for ${Python_EXECUTABLE}; "
      "install the build requirements of pyproject.toml, or set CUDACXX to an nvcc of CUDA 13.0")
  endif()
  set(CMAKE_CUDA_COMPILER "${ETAP_CUDA_ROOT}/bin/nvcc")
  # The wheels keep their libraries in lib, where nvcc.profile says lib64; CMake's compiler check already links.
  set(CMAKE_CUDA_FLAGS_INIT "-L${ETAP_CUDA_ROOT}/lib")
endif()
