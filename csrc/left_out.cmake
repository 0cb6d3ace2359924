# The package installs without kernels where they cannot be built, with a file that says why: native.py
# reads it, since pip shows what CMake prints to those only who ask for it.
function(dynsparse_leave_out reason)
  message(WARNING "dynsparse: the compiled kernels are left out: ${reason}")
  file(WRITE "${CMAKE_BINARY_DIR}/left_out.txt" "${reason}\n")
  install(FILES "${CMAKE_BINARY_DIR}/left_out.txt" DESTINATION dynsparse/_native)
endfunction()
