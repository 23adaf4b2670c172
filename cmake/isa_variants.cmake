# qcoll_isa_variants(TARGET SOURCE): compile SOURCE once for each instruction set level.
# Each object sees QCOLL_ISA and must export one symbol only (tests/cpp/test_symbols.cmake).
# No contraction: an FMA rounds once where the reference rounds twice, and the bits would differ.
function(qcoll_isa_variants target source)
  foreach(isa v2 v3 v4)
    set(object ${target}_${isa})
    add_library(${object} OBJECT ${source})
    target_include_directories(${object} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
    target_compile_definitions(${object} PRIVATE QCOLL_ISA=${isa})
    target_compile_options(${object} PRIVATE -O3 -march=x86-64-${isa} -fno-math-errno
                                             -fno-trapping-math -ffp-contract=off)
    if(isa STREQUAL v4)
      target_compile_options(${object} PRIVATE -mprefer-vector-width=512)
    endif()
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${object}>)
  endforeach()
endfunction()
