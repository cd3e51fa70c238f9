// What a program finds of cuDNN, libcudnn.so.9, where it is too old; nothing more.
#include <cstddef>

extern "C" std::size_t cudnnGetVersion() { return 90100; }
