# Writes the file OUTPUT, which defines TESSERA_VERSION_TEXT as VERSION and the commit of SOURCE: "0.1.0+6a74773". The
# text ends in ".changed" if files differ from that commit. Outside of a git checkout it is VERSION alone.
cmake_minimum_required(VERSION 3.25)
execute_process(COMMAND git describe --always --dirty=.changed --exclude=* --abbrev=9
  WORKING_DIRECTORY ${SOURCE} OUTPUT_VARIABLE commit ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
if(commit)
  string(APPEND VERSION "+${commit}")
endif()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT "#define TESSERA_VERSION_TEXT \"@VERSION@\"\n" @ONLY)
