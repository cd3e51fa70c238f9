// A stand-in for cuDNN (libcudnn.so.9) that reports a version too old for the program. It has no other function.
#include <cstddef>

extern "C" std::size_t cudnnGetVersion() { return 90100; }
