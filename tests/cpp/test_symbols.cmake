# cmake -DNM=nm -DISA=v4 -DOBJECT=block_kernels.cc.o -P test_symbols.cmake
# An object of one instruction set exports its kernel table and nothing else, and needs nothing but
# the C library's memory functions. A weak symbol in it (an inline function of a header) might be
# the copy that the linker keeps for the whole program, and a machine without that instruction set
# would run it.
foreach(kind defined undefined)
  execute_process(COMMAND ${NM} --${kind}-only --extern-only --format=posix ${OBJECT}
                  OUTPUT_VARIABLE lines RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${NM} failed on ${OBJECT}")
  endif()
  string(REGEX MATCHALL "[^\n]+" lines "${lines}")
  set(${kind} "")
  foreach(line ${lines})
    string(REGEX REPLACE " .*" "" symbol "${line}")
    list(APPEND ${kind} "${symbol}")
  endforeach()
endforeach()

set(table _ZN5qcoll5codec2${ISA}7kernelsE)
if(NOT "${defined}" STREQUAL "${table}")
  message(FATAL_ERROR "${OBJECT} exports \"${defined}\", expected only ${table}")
endif()
list(REMOVE_ITEM undefined memcpy memmove memset _GLOBAL_OFFSET_TABLE_)
if(NOT "${undefined}" STREQUAL "")
  message(FATAL_ERROR "${OBJECT} needs \"${undefined}\", expected memory functions only")
endif()
